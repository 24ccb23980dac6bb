"""Wrong answers to exercise 15.6, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("15.6", "this is rank 0's time").diff("""
Takes rank 0 for all.
- return max(of_rank(rank) for rank in range(mesh.ranks))
+ return of_rank(0)
""")
wrong("15.6", "this is the mean of all").diff("""
Averages the ranks.
- return max(of_rank(rank) for rank in range(mesh.ranks))
+ return sum(of_rank(rank) for rank in range(mesh.ranks)) / mesh.ranks
""")
wrong("15.6", "pays the latency of its link").diff("""
Counts bytes only.
-         total += sent[axis].messages * link.latency + sent[axis].size / link.bandwidth
+         total += sent[axis].size / link.bandwidth
""")
wrong("15.6", "not once for an axis").diff("""
Pays the latency once.
-         total += sent[axis].messages * link.latency + sent[axis].size / link.bandwidth
+         total += link.latency + sent[axis].size / link.bandwidth
""")
wrong("15.6", "not if its size is at most a host's").diff("""
Compares sizes.
-         link = inside if len(hosts) == 1 else across
+         link = inside if mesh.size(axis) <= host else across
""")
wrong("15.6", "add up their times").diff("""
Takes the slowest axis only.
-         total += sent[axis].messages * link.latency + sent[axis].size / link.bandwidth
+         total = max(total, sent[axis].messages * link.latency + sent[axis].size / link.bandwidth)
""")
wrong("15.6", "no part of its messages is faster").diff("""
Mixes the two links.
-         hosts = {peer // host for peer in mesh.peers(rank, axis)}
-         link = inside if len(hosts) == 1 else across
-         total += sent[axis].messages * link.latency + sent[axis].size / link.bandwidth
+         peers = mesh.peers(rank, axis)
+         far = sum(peer // host != rank // host for peer in peers) / len(peers)
+         for link, share in ((across, far), (inside, 1 - far)):
+             total += share * (sent[axis].messages * link.latency + sent[axis].size / link.bandwidth)
""")
wrong("15.6", "neighbouring numbers share one").diff("""
Deals the ranks out to the hosts.
-         hosts = {peer // host for peer in mesh.peers(rank, axis)}
+         hosts = {peer % host for peer in mesh.peers(rank, axis)}
""")
wrong("15.6", "only a rank's next neighbour is looked at").diff("""
Looks at the next rank of the group.
-         hosts = {peer // host for peer in mesh.peers(rank, axis)}
+         peers = list(mesh.peers(rank, axis))
+         hosts = {rank // host, peers[(peers.index(rank) + 1) % len(peers)] // host}
""")
wrong("15.6", "this takes the fast link for groups that cross hosts").diff("""
Swaps the links.
-         link = inside if len(hosts) == 1 else across
+         link = across if len(hosts) == 1 else inside
""")
wrong("15.6", "this adds up the slowest rank of each axis").diff("""
Takes the slowest rank of each axis.
- return max(of_rank(rank) for rank in range(mesh.ranks))
+ slowest = 0.0
+ for axis in mesh.divided:
+     crosses = any(len({peer // host for peer in mesh.peers(rank, axis)}) > 1 for rank in range(mesh.ranks))
+     link = across if crosses else inside
+     slowest += sent[axis].messages * link.latency + sent[axis].size / link.bandwidth
+ return slowest
""")
wrong("15.6", "go through `mesh.divided`").diff("""
Goes through all traffic.
-     for axis in mesh.divided:
+     for axis in sent:
""")
wrong("15.6", "more than the first axis may cross hosts").diff("""
Takes the first axis across hosts, and no other.
-     for axis in mesh.divided:
-         hosts = {peer // host for peer in mesh.peers(rank, axis)}
-         link = inside if len(hosts) == 1 else across
+     for place, axis in enumerate(mesh.divided):
+         link = inside if place else across
""")
