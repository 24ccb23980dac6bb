"""The reference answers to the labs' exercises, a module per lab: `minifsdp.course.reference.lab05`."""
