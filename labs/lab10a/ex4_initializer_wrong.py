"""Wrong answers to exercise 10a.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("10a.4", "goes down into the children unless `recurse=False`").diff("""
Gives the whole subtree memory, and takes away what the children had.
- def own(module):
-     return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

- if not own(module):
+ own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
+ if not own:
- if any(t.is_meta for t in own(module).values()):
-     module.to_empty(device=where, recurse=False)
-     for t in own(module).values():
-         t.fill_(torch.nan)
+ if any(t.is_meta for t in own):
+     module.to_empty(device=where)
+     for t in (*module._parameters.values(), *module._buffers.values()):
+         if t is not None:
+             t.fill_(torch.nan)
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
-     raise RuntimeError(f"nothing has initialized {', '.join(left)}")
""")
wrong("10a.4", "the same seed for every module").diff("""
Seeds, and forgets the name.
- def own(module):
-     return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

- if not own(module):
+ own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ if not own:
- if any(t.is_meta for t in own(module).values()):
+ if any(t.is_meta for t in own.values()):
-     for t in own(module).values():
-         t.fill_(torch.nan)
- torch.manual_seed(seed + crc32(names[module].encode()))
+     for k in own:
+         getattr(module, k).fill_(torch.nan)
+ torch.manual_seed(seed)
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
""")
wrong("10a.4", "differs from process to process").diff("""
Python's hash of a string has a salt.
- def own(module):
-     return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

- if not own(module):
+ own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ if not own:
- if any(t.is_meta for t in own(module).values()):
+ if any(t.is_meta for t in own.values()):
-     for t in own(module).values():
-         t.fill_(torch.nan)
- torch.manual_seed(seed + crc32(names[module].encode()))
+     for k in own:
+         getattr(module, k).fill_(torch.nan)
+ torch.manual_seed(seed + hash(names[module]) % 2**32)
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
""")
wrong("10a.4", "nothing of its own is none of its business").diff("""
Resets containers as well.
- def own(module):
-     return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

- if not own(module):
-     return
- if any(t.is_meta for t in own(module).values()):
+ own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ if any(t.is_meta for t in own.values()):
- for t in own(module).values():
-     t.fill_(torch.nan)
+ for k in own:
+     getattr(module, k).fill_(torch.nan)
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
""")
wrong("10a.4", "gives memory with any values in it").diff("""
Does not look whether everything was written.
- def own(module):
-     return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

- if not own(module):
+ own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ if not own:
- if any(t.is_meta for t in own(module).values()):
+ if any(t.is_meta for t in own.values()):
- for t in own(module).values():
-     t.fill_(torch.nan)

- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
-     raise RuntimeError(f"nothing has initialized {', '.join(left)}")
""")
wrong("10a.4", "whether on meta or not").diff("""
Leaves a module alone that has values, so that an eager model keeps others.
- def own(module):
-     return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

- if not own(module):
+ own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ if not any(t.is_meta for t in own.values()):
- if any(t.is_meta for t in own(module).values()):
-     module.to_empty(device=where, recurse=False)
-     for t in own(module).values():
-         t.fill_(torch.nan)
+ module.to_empty(device=where, recurse=False)
+ for k in own:
+     getattr(module, k).fill_(torch.nan)
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
""")


@wrong("10a.4", "it raises: KeyError")
def initializer(model, reset, where, seed):
    """Asks for the names when the model has been wrapped already."""

    @torch.no_grad()
    def initialize(module):
        names = {each: name for name, each in model.named_modules() if "." not in name}
        own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
        if not own:
            return
        if any(t.is_meta for t in own.values()):
            module.to_empty(device=where, recurse=False)
        torch.manual_seed(seed + crc32(names[module].encode()))
        reset(module)

    return initialize


wrong("10a.4", "is nothing to differentiate").diff("""
Lets autograd watch the initialization.
- def own(module):
-     return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}
- @torch.no_grad()

- if not own(module):
+ own = {k: t for k, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ if not own:
- if any(t.is_meta for t in own(module).values()):
+ if any(t.is_meta for t in own.values()):
- for t in own(module).values():
-     t.fill_(torch.nan)
+ for k in own:
+     getattr(module, k).data.fill_(torch.nan)
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{k}" for k in own if getattr(module, k).isnan().any()]:
""")
wrong("10a.4", "has a buffer and no parameters is initialized too").diff("""
Returns early when there is no parameter.
- if not own(module):
+ if not any(p is not None for p in module._parameters.values()):
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
""")
wrong("10a.4", "RoPE's frequencies are one").diff("""
Looks for NaN in parameters alone.
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [
+     f"{names[module]}.{name}"
+     for name, t in own(module).items()
+     if name in module._parameters and t.isnan().any()
+ ]:
""")
wrong("10a.4", "whether any is left").diff("""
Looks for tensors of which nothing was written.
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().all()]:
""")
wrong("10a.4", "all that is not written").diff("""
Names one of those that were not written.
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
-     raise RuntimeError(f"nothing has initialized {', '.join(left)}")
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
+     raise RuntimeError(f"nothing has initialized {left[0]}")
""")
wrong("10a.4", "if any of them is on meta").diff("""
Gives memory only when everything is on meta.
- if any(t.is_meta for t in own(module).values()):
+ if all(t.is_meta for t in own(module).values()):
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
""")
wrong("10a.4", "a module in several places has the first").diff("""
Has the last name of a module in several places.
- names = {module: name for name, module in model.named_modules()}
+ names = {module: name for name, module in model.named_modules(remove_duplicate=False)}
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
""")
wrong("10a.4", "wrapping has changed it").diff("""
Asks for the name when the tree is another one already.
      return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ def now(module):
+     return next(name for name, each in model.named_modules() if each is module)
- torch.manual_seed(seed + crc32(names[module].encode()))
+ torch.manual_seed(seed + crc32(now(module).encode()))
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
""")
wrong("10a.4", "depends on their order").diff("""
Counts calls in place of naming modules.
      return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}
+ calls = []
- torch.manual_seed(seed + crc32(names[module].encode()))
+ calls.append(module)
+ torch.manual_seed(seed + len(calls))
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
""")
wrong("10a.4", "the class is no name").diff("""
Seeds by class.
- torch.manual_seed(seed + crc32(names[module].encode()))
+ torch.manual_seed(seed + crc32(type(module).__name__.encode()))
- if left := [f"{names[module]}.{name}".lstrip(".") for name, t in own(module).items() if t.isnan().any()]:
+ if left := [f"{names[module]}.{name}" for name, t in own(module).items() if t.isnan().any()]:
""")
wrong("10a.4", "`device=where`").diff("""
Gives memory on the CPU, wherever it should be.
- module.to_empty(device=where, recurse=False)
+ module.to_empty(device="cpu", recurse=False)
""")
wrong("10a.4", "memory and NaN are for what is on meta").diff("""
Fills a module with NaN that has values.
- if any(t.is_meta for t in own(module).values()):
-     module.to_empty(device=where, recurse=False)
-     for t in own(module).values():
-         t.fill_(torch.nan)
+ module.to_empty(device=where, recurse=False)
+ for t in own(module).values():
+     t.fill_(torch.nan)
""")
wrong("10a.4", "`set_grad_enabled` stays").diff("""
Switches gradients off for ever.
- @torch.no_grad()

  def initialize(module):
+     torch.set_grad_enabled(False)
""")
wrong("10a.4", "in the tensor's own dtype").diff("""
Replaces the memory by one in the default dtype.
- t.fill_(torch.nan)
+ t.data = torch.full(t.shape, torch.nan, device=where)
""")
wrong("10a.4", "writes no more than the first").diff("""
Resets once more what has left NaN.
- reset(module)
+ reset(module)
+ if any(t.isnan().any() for t in own(module).values()):
+     reset(module)
""")
wrong("10a.4", "also one that it has had before").diff("""
Initializes each module once.
- names = {module: name for name, module in model.named_modules()}
+ names, had = {module: name for name, module in model.named_modules()}, set()
- if not own(module):
+ if not own(module) or module in had:
-     return
- if any(t.is_meta for t in own(module).values()):
+     return
+ had.add(module)
+ if any(t.is_meta for t in own(module).values()):
""")
wrong("10a.4", "partly on meta: expected values, got a meta tensor").diff("""
Asks the first of a module's tensors whether it is on meta.
- if any(t.is_meta for t in own(module).values()):
+ if next(iter(own(module).values())).is_meta:
""")
wrong("10a.4", "with the name ''").diff("""
Takes a module without a name for one that is not in the model.
- if not own(module):
+ if not own(module) or not names[module]:
""")
wrong("10a.4", "expected RuntimeError, got ValueError").diff("""
Raises another error.
- raise RuntimeError(f"nothing has initialized {', '.join(left)}")
+ raise ValueError(f"nothing has initialized {', '.join(left)}")
""")
