"""Wrong answers to exercise 1.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("1.5", "replaces the tensor instead of being added").diff("""
Overwrites where it should add.
- ranks = group.size()
+ ranks, distance = group.size(), 1
- distance = 1

- arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
- comm.recv(arriving, (target + place + distance) % ranks, group).wait()
- tensor += arriving
+ comm.recv(tensor, (target + place + distance) % ranks, group).wait()
""")


@wrong("1.5", "nothing has been added to it")
def reduce(tensor, target, group):
    """Reduces on rank 0, whatever the target."""
    rank, ranks, distance = group.rank(), group.size(), 1
    while distance < ranks and rank % distance == 0:
        if rank % (2 * distance) == distance:
            comm.send(tensor, rank - distance, group).wait()
        elif rank + distance < ranks:
            arriving = torch.empty_like(tensor)
            comm.recv(arriving, rank + distance, group).wait()
            tensor += arriving
        distance *= 2


@wrong("1.5", "every rank sends to the target itself")
def reduce(tensor, target, group):
    """A star: right values, N - 1 rounds."""
    if group.rank() != target:
        comm.send(tensor, target, group).wait()
        return
    for source in range(group.size()):
        if source != target:
            arriving = torch.empty_like(tensor)
            comm.recv(arriving, source, group).wait()
            tensor += arriving


wrong("1.5", "some ranks are left out").diff("""
Takes int(log2 N) rounds, one too few unless N is a power of two.
- distance = 1
- while distance < ranks and place % distance == 0:
+ for round in range(ranks.bit_length() - 1):
+     distance = 2**round
- elif place + distance < ranks:
-     arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
+     return
+ if place % (2 * distance) == 0 and place + distance < 2 ** (ranks.bit_length() - 1):
+     arriving = torch.empty_like(tensor)
- distance *= 2
""")
wrong("1.5", "this is the mean").diff("""
Divides by N, unasked.
- ranks = group.size()
+ ranks, distance = group.size(), 1
- distance = 1

- arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
+ arriving = torch.empty_like(tensor)
      distance *= 2
+ tensor /= ranks
""")
wrong("1.5", "by another tree").diff("""
Runs the broadcast's rounds backwards, the largest distance first.
- distance = 1
- while distance < ranks and place % distance == 0:
-     if place % (2 * distance) == distance:
+ distance = 2 ** (ceil(log2(ranks)) - 1) if ranks > 1 else 0
+ while distance >= 1:
+     if distance <= place < 2 * distance:
- elif place + distance < ranks:
+     return
+ if place + distance < ranks:
- distance *= 2
+ distance //= 2
""")
wrong("1.5", "so that its bytes are counted").diff("""
Takes its buffers from torch, where nobody counts them.
- ranks = group.size()
+ ranks, distance = group.size(), 1
- distance = 1

- arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
+ arriving = torch.empty_like(tensor)
""")
wrong("1.5", "this code always takes float32").diff("""
Writes a dtype down: tensors of another one arrive as garbage.
- ranks = group.size()
+ ranks, distance = group.size(), 1
- distance = 1

- arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
+ arriving = device.empty(tensor.numel(), torch.float32, "communication", tensor.device).view_as(tensor)
""")
wrong("1.5", "every rank but the target sends once").diff("""
Goes on after it has sent, and sends again.
- ranks = group.size()
+ ranks, distance = group.size(), 1
- distance = 1
- while distance < ranks and place % distance == 0:
-     if place % (2 * distance) == distance:
+ while distance < ranks:
+     if place % (2 * distance) >= distance:
""")
wrong("1.5", "view it as `tensor`").diff("""
Adds the flat buffer to a tensor of another shape.
- ranks = group.size()
+ ranks, distance = group.size(), 1
- distance = 1

- arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
+ arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device)
""")


@wrong("1.5", "expected `group`, got the world")
def reduce(tensor, target, group):
    """Sends in the world."""
    group = comm.world()
    n = group.size()
    place = (group.rank() - target) % n
    d = 1
    while d < n and place % d == 0:
        if place % (2 * d) == d:
            comm.send(tensor, (target + place - d) % n, group).wait()
        elif place + d < n:
            a = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
            comm.recv(a, (target + place + d) % n, group).wait()
            tensor += a
        d *= 2


@wrong("1.5", "rank 0, tensor over 5 ranks, target 0")
def reduce(tensor, target, group):
    """Has two rounds, enough for four ranks."""
    n = group.size()
    place = (group.rank() - target) % n
    for d in (1, 2):
        if place % d:
            break
        if place % (2 * d) == d:
            comm.send(tensor, (target + place - d) % n, group).wait()
        elif place + d < n:
            a = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
            comm.recv(a, (target + place + d) % n, group).wait()
            tensor += a


@wrong("1.5", "rank 0, tensor over 2 ranks, target 0")
def reduce(tensor, target, group):
    """Gives the tensor other memory for the sum."""
    n = group.size()
    place = (group.rank() - target) % n
    d = 1
    while d < n and place % d == 0:
        if place % (2 * d) == d:
            comm.send(tensor, (target + place - d) % n, group).wait()
        elif place + d < n:
            a = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
            comm.recv(a, (target + place + d) % n, group).wait()
            tensor.data = tensor + a
        d *= 2


wrong("1.5", "got bfloat16 from device.empty as gradients").diff("""
Hands its buffers out as gradients.
- arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
+ arriving = device.empty(tensor.numel(), tensor.dtype, "gradients", tensor.device).view_as(tensor)
""")
wrong("1.5", "tuple index out of range").diff("""
Gives every buffer two dimensions.
- arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view_as(tensor)
+ arriving = device.empty(tensor.numel(), tensor.dtype, "communication", tensor.device).view(tensor.shape[0], -1)
""")
