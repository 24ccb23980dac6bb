"""Wrong answers to exercise 10b.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("10b.1", "every rank takes part in every all-gather").diff("""
Only those gather who keep something.
  kept = {}
+ if keep is None:
+     return kept
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
-         kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
""")
wrong("10b.1", "free a unit before the next one is gathered").diff("""
Gathers everything, keeps, frees everything.
- for flat, names in units:
+ for flat, _ in units:
-     if keep is not None:
-         for names_of_one, view in zip(names, flat.views, strict=True):
+ for flat, names in units:
+     for names_of_one, view in zip(names, flat.views, strict=True):
+         if keep is not None:
""")
wrong("10b.1", "stays unsharded next to its state dict").diff("""
Frees nothing.
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     if keep is not None:
- device.free(flat.full)
""")
wrong("10b.1", "freed before it was kept").diff("""
Frees the unit, and looks at it then.
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
-         kept.update(dict.fromkeys(names_of_one, keep(view.detach())))

  device.free(flat.full)
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     if keep is not None:
+         kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
""")
wrong("10b.1", "a plain module's state dict has all names of a tied weight").diff("""
Takes the first name of each parameter.
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
-         kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     if keep is not None:
+         kept[names_of_one[0]] = keep(view.detach())
""")
wrong("10b.1", "a tied parameter is kept once").diff("""
Keeps a copy for each name.
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
-         kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     for name in names_of_one if keep is not None else []:
+         kept[name] = keep(view.detach())
""")
wrong("10b.1", "until the handle's `wait()` the buffer holds anything").diff("""
Does not wait for the gather.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
+ comm.all_gather(flat.full.data, flat.shard.data, group)
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     if keep is not None:
""")
wrong("10b.1", "one all-gather per unit, whatever the rank keeps").diff("""
Gathers the unit's parameters one by one, by an object collective's cousin: an all-reduce of zeros.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
+ flat.full.data.zero_()
+ size = flat.shard.numel()
+ flat.full.data[group.rank() * size :][:size].copy_(flat.shard.data)
+ comm.all_reduce(flat.full.data, group).wait()
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     if keep is not None:
""")
wrong("10b.1", "a rank whose `keep` is None gets an empty dict").diff("""
Enters the names on ranks that keep nothing.
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
-         kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     kept.update(dict.fromkeys(names_of_one, keep(view.detach()) if keep else None))
""")
wrong("10b.1", "`group` need not be the world").diff("""
Gathers over the world, whatever the group is.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
+ comm.all_gather(flat.full.data, flat.shard.data, comm.world()).wait()
""")
wrong("10b.1", "on ranks that keep nothing too").diff("""
Frees where it keeps, and nowhere else.
- device.free(flat.full)
+     device.free(flat.full)
""")
wrong("10b.1", "`set_grad_enabled` stays").diff("""
Switches gradients off, for ever.
  def whole_values(units, group, keep):
+     torch.set_grad_enabled(False)
""")
wrong("10b.1", "whatever its number").diff("""
Rank 0 keeps, whoever has a `keep`.
- if keep is not None:
+ if group.rank() == 0:
""")
wrong("10b.1", "rank 0, the result: expected {}").diff("""
Collects in a default argument, which goes on growing.
- def whole_values(units, group, keep):
-     kept = {}
+ def whole_values(units, group, keep, kept={}):
""")
wrong("10b.1", "and their dtype").diff("""
Casts to fp32 in a buffer of its own.
- kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
+ kept.update(dict.fromkeys(names_of_one, keep(view.detach().float())))
""")
wrong("10b.1", "under all names of a parameter, not a copy").diff("""
Copies what was kept for the second name.
- for names_of_one, view in zip(names, flat.views, strict=True):
-     kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
+ for view, (first, *others) in zip(flat.views, names, strict=False):
+     kept[first] = keep(view.detach())
+     for name in others:
+         kept[name] = kept[first].clone()
""")
wrong("10b.1", "missing (again.weight)").diff("""
Knows parameters of two names at most.
- kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
+ kept.update(dict.fromkeys(names_of_one[:2], keep(view.detach())))
""")
