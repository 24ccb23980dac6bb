"""Wrong answers to exercise 0.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("0.4", "the parameters are counted").diff("""
Counts the weights, which autograd saves too, but which would be there without it.
- parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

- storage = tensor.untyped_storage()
- if storage.data_ptr() not in parameters:
-     saved[storage.data_ptr()] = storage.nbytes()
+ saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
-     loss = forward()
- del loss  # it held the graph, and with it all that was counted
+     forward()
""")
wrong("0.4", "and twice what two operators save").diff("""
Adds up tensors as they come: views at their own size, shared storages again and again.
- saved = {}
+ sizes = []
- storage = tensor.untyped_storage()
- if storage.data_ptr() not in parameters:
-     saved[storage.data_ptr()] = storage.nbytes()
+ if tensor.untyped_storage().data_ptr() not in parameters:
+     sizes.append(tensor.nbytes)
-     loss = forward()
- del loss  # it held the graph, and with it all that was counted
- return sum(saved.values())
+     forward()
+ return sum(sizes)
""")
wrong("0.4", "a view keeps its whole storage alive").diff("""
Tells storages apart, but takes a view for as large as it looks.
- storage = tensor.untyped_storage()
- if storage.data_ptr() not in parameters:
-     saved[storage.data_ptr()] = storage.nbytes()
+ if tensor.untyped_storage().data_ptr() not in parameters:
+     saved[tensor.untyped_storage().data_ptr()] = tensor.nbytes
-     loss = forward()
- del loss  # it held the graph, and with it all that was counted
+     forward()
""")
wrong("0.4", "hand back tensor.detach()").diff("""
Packs the tensor itself: its graph holds it and it holds its graph, so nothing is ever freed.
- storage = tensor.untyped_storage()
- if storage.data_ptr() not in parameters:
-     saved[storage.data_ptr()] = storage.nbytes()
- return tensor.detach()
+ if tensor.untyped_storage().data_ptr() not in parameters:
+     saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
+ return tensor
-     loss = forward()
- del loss  # it held the graph, and with it all that was counted
+     forward()
""")
wrong("0.4", "run forward once").diff("""
Runs forward a second time to warm up, and so counts and keeps two graphs.
- storage = tensor.untyped_storage()
- if storage.data_ptr() not in parameters:
-     saved[storage.data_ptr()] = storage.nbytes()
+ if tensor.untyped_storage().data_ptr() not in parameters:
+     saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
      return tensor.detach()
+ forward()
-     loss = forward()
- del loss  # it held the graph, and with it all that was counted
+     forward()
""")


@wrong("0.4", "backward after it raises")
def saved_bytes(forward, model):
    """Counts and keeps nothing: forward is cheap, and backward has nothing to work with."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved, held = {}, []

    def pack(tensor):
        held.append(tensor.detach())
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        forward()
    return sum(saved.values())


@wrong("0.4", "compare storages, not tensors")
def saved_bytes(forward, model):
    """Looks for the parameters by the identity of tensors, and adds up tensors as they come."""
    parameters = {id(p) for p in model.parameters()}
    sizes = []

    def pack(tensor):
        if id(tensor) not in parameters:
            sizes.append(tensor.nbytes)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(sizes)


@wrong("0.4", "something outside still holds them")
def saved_bytes(forward, model):
    """Collects what is saved in a list that outlives the loss."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved_bytes.kept = kept = []

    def pack(tensor):
        kept.append(tensor.detach())
        return kept[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for place, size in storages.items() if place not in parameters)


@wrong("0.4", "a buffer is no parameter")
def saved_bytes(forward, model):
    """Leaves out all of the state dict, buffers too."""
    mine = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    saved = {}

    def pack(t):
        s = t.untyped_storage()
        if s.data_ptr() not in mine:
            saved[s.data_ptr()] = s.nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(saved.values())


@wrong("0.4", "a frozen parameter is one too")
def saved_bytes(forward, model):
    """Leaves out trainable parameters only."""
    mine = {t.untyped_storage().data_ptr() for t in model.parameters() if t.requires_grad}
    saved = {}

    def pack(t):
        s = t.untyped_storage()
        if s.data_ptr() not in mine:
            saved[s.data_ptr()] = s.nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(saved.values())


@wrong("0.4", "ask the storage")
def saved_bytes(forward, model):
    """Takes every element for 4 bytes."""
    mine = {t.untyped_storage().data_ptr() for t in model.parameters()}
    saved = {}

    def pack(t):
        s = t.untyped_storage()
        if s.data_ptr() not in mine:
            saved[s.data_ptr()] = 4 * (s.nbytes() // t.element_size())
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(saved.values())


@wrong("0.4", "indices are saved as well")
def saved_bytes(forward, model):
    """Counts floating point only."""
    mine = {t.untyped_storage().data_ptr() for t in model.parameters()}
    saved = {}

    def pack(t):
        s = t.untyped_storage()
        if s.data_ptr() not in mine and t.is_floating_point():
            saved[s.data_ptr()] = s.nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(saved.values())


@wrong("0.4", "each call counts what it has seen itself")
def saved_bytes(forward, model, saved={}):  # noqa: B006
    """Has a mutable default: what was saved stays from call to call."""
    mine = {t.untyped_storage().data_ptr() for t in model.parameters()}

    def pack(t):
        s = t.untyped_storage()
        if s.data_ptr() not in mine:
            saved[s.data_ptr()] = s.nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return sum(saved.values())


wrong("0.4", "a part of one is known by its storage").diff("""
Knows parameters by where they begin, and not their storages.
- parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
- saved = {}
+ known = {p.data_ptr() for p in model.parameters()}
+ sizes = {}
- if storage.data_ptr() not in parameters:
-     saved[storage.data_ptr()] = storage.nbytes()
+ if tensor.data_ptr() not in known:
+     sizes[storage.data_ptr()] = storage.nbytes()
- return sum(saved.values())
+ return sum(sizes.values())
""")
wrong("0.4", "KeyError").diff("""
Hands out each saved tensor once only.
- with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
+ kept = {}
+ def once(tensor):
+     kept[len(kept)] = pack(tensor)
+     return len(kept) - 1
+ with torch.autograd.graph.saved_tensors_hooks(once, kept.pop):
""")


@wrong("0.4", "an embedding in float64: gradients")
def saved_bytes(forward, model):
    """Keeps a tensor for each storage and shape, and gives back the first of them."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved, first = {}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() in parameters:
            return tensor.detach()
        saved[storage.data_ptr()] = storage.nbytes()
        first.setdefault((storage.data_ptr(), tensor.shape), tensor.detach())
        return storage.data_ptr(), tensor.shape

    def unpack(key):
        return key if isinstance(key, Tensor) else first[key]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = forward()
    del loss
    return sum(saved.values())


wrong("0.4", "keeps beside what was counted").diff("""
Packs a copy: what is counted is freed, and what is kept is not counted.
- return tensor.detach()
+ return tensor.detach().clone()
""")
wrong("0.4", "gradients and modes of the model are the caller's").diff("""
Runs backward to see that it works, and drops the gradients.
- loss = forward()
+ loss = forward()
+ loss.backward(retain_graph=True)
+ model.zero_grad()
""")
