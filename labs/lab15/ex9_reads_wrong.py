"""Wrong answers to exercise 15.9, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("15.9", "replicas have saved equal parts").diff("""
Reads every replica.
-         if part is None or part in seen:
+         if part is None:
""")
wrong("15.9", "not of the parameter").diff("""
Counts in the parameter, for the source.
-             source = tuple(slice(low - c, high - c) for (low, high), (c, _) in zip(common, part, strict=True))
+             source = tuple(slice(low, high) for low, high in common)
""")
wrong("15.9", "count from the first element of the wanted part").diff("""
Counts in the parameter, for the target.
-             target = tuple(slice(low - a, high - a) for (low, high), (a, _) in zip(common, box, strict=True))
+             target = tuple(slice(low, high) for low, high in common)
""")
wrong("15.9", "leave them out").diff("""
Keeps empty reads.
-         if all(low < high for low, high in common):
+         if True:
""")
wrong("15.9", "may lie in several files").diff("""
Takes the first file that has something.
-             found.append(Read(file, name, source, target))
+             found.append(Read(file, name, source, target))
+             break
""")
wrong("15.9", "a stage's files have its own parameters only").diff("""
Expects every parameter in every file.
-         part = parts.get(name)
+         part = parts.get(name, box)
""")
wrong("15.9", "both are the part in common").diff("""
Reads saved parts whole.
-             source = tuple(slice(low - c, high - c) for (low, high), (c, _) in zip(common, part, strict=True))
+             source = tuple(slice(0, d - c) for c, d in part)
""")
wrong("15.9", "both slices begin at the part in common").diff("""
Reads from the beginning of the saved part.
-             source = tuple(slice(low - c, high - c) for (low, high), (c, _) in zip(common, part, strict=True))
+             source = tuple(slice(0, high - low) for low, high in common)
""")
wrong("15.9", "go through `wanted`").diff("""
Reads all that is in the files.
- for name, box in wanted.items():
+ for name in {name: None for parts in saved for name in parts}:
+     box = wanted.get(name, next(parts[name] for parts in saved if name in parts))
""")
wrong("15.9", "one for each dimension").diff("""
Cuts the first dimension only.
-             source = tuple(slice(low - c, high - c) for (low, high), (c, _) in zip(common, part, strict=True))
-             target = tuple(slice(low - a, high - a) for (low, high), (a, _) in zip(common, box, strict=True))
+             source = tuple(slice(low - c, high - c) for (low, high), (c, _) in zip(common, part))[:1]
+             target = tuple(slice(low - a, high - a) for (low, high), (a, _) in zip(common, box))[:1]
""")
wrong("15.9", "source and target have changed places").diff("""
Swaps source and target.
-             found.append(Read(file, name, source, target))
+             found.append(Read(file, name, target, source))
""")
wrong("15.9", "add its length to its start").diff("""
Gives slices a length instead of an end.
-             source = tuple(slice(low - c, high - c) for (low, high), (c, _) in zip(common, part, strict=True))
-             target = tuple(slice(low - a, high - a) for (low, high), (a, _) in zip(common, box, strict=True))
+             source = tuple(slice(low - c, high - low) for (low, high), (c, _) in zip(common, part, strict=True))
+             target = tuple(slice(low - a, high - low) for (low, high), (a, _) in zip(common, box, strict=True))
""")
