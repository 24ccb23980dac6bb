"""Right answers that are not the reference's: each must pass."""

from minifsdp.course.workshop.wrong import right


@right("10b.5")
def commit(disk, folder, name, files, rank, barrier):
    """Lets every rank sync the part after its own files, and the folder after the rename."""
    part, whole = folder / f".{name}.part", folder / name
    if rank == 0:
        disk.make_folder(part)
    barrier()
    for file, content in files.items():
        disk.write(part / file, content)
        disk.sync(part / file)
    disk.sync(part)
    barrier()
    if rank == 0:
        disk.rename(part, whole)
    barrier()
    disk.sync(folder)
