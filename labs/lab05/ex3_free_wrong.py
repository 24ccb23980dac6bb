"""Wrong answers to exercise 5.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("5.3", "nothing gives the memory back")
def free(flat):
    """Never frees: plain data parallelism with extra gathers."""


wrong("5.3", "dropping a name frees nothing").diff("""
Drops the name; the views keep the storage.
- device.free(flat.full)
+ del flat.full
""")
wrong("5.3", "another tensor under the same name").diff("""
Puts an empty tensor in its place.
- device.free(flat.full)
+ flat.full = torch.empty(0)
""")
wrong("5.3", "gives this one tensor another storage").diff("""
Swaps the tensor's data; the views keep the old storage.
- device.free(flat.full)
+ flat.full.data = torch.empty(0)
""")
wrong("5.3", "changes the tensor's shape and leaves the storage").diff("""
Resizes the tensor, not its storage.
- device.free(flat.full)
+ flat.full.resize_(0)
""")
wrong("5.3", "zeros take as much memory").diff("""
Overwrites the values.
- device.free(flat.full)
+ flat.full.data.zero_()
""")
wrong("5.3", "free `flat.full` alone").diff("""
Frees the shard as well.
  device.free(flat.full)
+ device.free(flat.shard)
""")
