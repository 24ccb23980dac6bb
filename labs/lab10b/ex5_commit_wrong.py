"""Wrong answers to exercise 10b.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("10b.5", "half a checkpoint has the name of a whole one").diff("""
Writes under the final name at once.
- part, whole = folder / f".{name}.part", folder / name
+ whole = folder / name
- disk.make_folder(part)
+ disk.make_folder(whole)
- disk.write(part / file, content)
- disk.sync(part / file)
+ disk.write(whole / file, content)
+ disk.sync(whole / file)
- disk.sync(part)
- disk.rename(part, whole)
+ disk.sync(whole)
""")
wrong("10b.5", "sync each file that was written").diff("""
Syncs folders only.
- disk.sync(part / file)
""")
wrong("10b.5", "a barrier before the rename").diff("""
Rank 0 renames when it has finished itself.
      disk.sync(part / file)
- barrier()
""")
wrong("10b.5", "before rank 0 has made the folder").diff("""
No barrier after the folder is made.
      disk.make_folder(part)
- barrier()
""")
wrong("10b.5", "sync the part before it is renamed").diff("""
The files' names in the part are never synced.
- disk.sync(part)
""")
wrong("10b.5", "it saves no names that are added afterwards").diff("""
Syncs the part while it is empty.
  disk.make_folder(part)
+ disk.sync(part)
- disk.sync(part)
""")
wrong("10b.5", "sync `folder`, after the rename").diff("""
The rename itself is never synced.
- disk.rename(part, whole)

  disk.sync(folder)
+ disk.rename(part, whole)
""")
wrong("10b.5", "hence the last barrier").diff("""
The others go on while rank 0 renames.
      disk.sync(folder)
- barrier()
""")
wrong("10b.5", "one rank gives the name").diff("""
Every rank renames.
- if rank == 0:
-     disk.sync(part)
-     disk.rename(part, whole)
-     disk.sync(folder)
+ disk.sync(part)
+ disk.rename(part, whole)
+ disk.sync(folder)
""")
wrong("10b.5", "a barrier is for all ranks").diff("""
A barrier that only rank 0 comes to.
      disk.sync(folder)
- barrier()
+     barrier()
""")
wrong("10b.5", "sync saves what has been written before it").diff("""
Makes and syncs the files, and then fills them.
      disk.make_folder(part)
  barrier()
+ for file in files:
+     disk.write(part / file, b"")
+     disk.sync(part / file)
- disk.sync(part / file)
""")
wrong("10b.5", "call no barrier after an error").diff("""
Comes to the barrier though a write has failed, so that nobody hangs.
- for file, content in files.items():
-     disk.write(part / file, content)
-     disk.sync(part / file)
- barrier()
+ try:
+     for file, content in files.items():
+         disk.write(part / file, content)
+         disk.sync(part / file)
+ finally:
+     barrier()
""")
wrong("10b.5", "do not swallow the error").diff("""
Goes on when the disk is full.
- disk.write(part / file, content)
- disk.sync(part / file)
+ try:
+     disk.write(part / file, content)
+     disk.sync(part / file)
+ except OSError:
+     pass
""")
wrong("10b.5", "the folder is that of another run").diff("""
Goes on in the part of a killed run.
- disk.make_folder(part)
+ try:
+     disk.make_folder(part)
+ except FileExistsError:
+     print("there is a part already")
""")
wrong("10b.5", "as many barriers on every rank").diff("""
A barrier for each file.
  disk.sync(part / file)
+ barrier()
""")
wrong("10b.5", "and remove nothing").diff("""
Takes files off the dict that it was given.
- for file, content in files.items():
+ while files:
+     file, content = files.popitem()
""")
wrong("10b.5", "got all but rank-0-b").diff("""
Writes no empty files.
- disk.write(part / file, content)
- disk.sync(part / file)
+ if content:
+     disk.write(part / file, content)
+     disk.sync(part / file)
""")
wrong("10b.5", "expected its bytes, got others").diff("""
Takes the bytes for a line of text.
- disk.write(part / file, content)
+ disk.write(part / file, content.strip())
""")
wrong("10b.5", "expected run/.step-7.5.part").diff("""
Takes what follows a dot in the name for the ending of a file.
- part, whole = folder / f".{name}.part", folder / name
+ part, whole = folder / f".{Path(name).stem}.part", folder / name
""")
wrong("10b.5", "the error goes up as it is").diff("""
Raises an error of its own.
- disk.make_folder(part)
+ try:
+     disk.make_folder(part)
+ except OSError as error:
+     raise RuntimeError("the disk is full") from error
""")
