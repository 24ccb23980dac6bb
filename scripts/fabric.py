"""Ranks started by Lightning Fabric, as in a script that trains with it: python scripts/fabric.py train [OPTIONS]."""

from lightning_fabric import Fabric

from minifsdp.course.cli import main

Fabric(accelerator="cpu", devices=2, strategy="ddp").launch()  # it runs this script again, as rank 1
main()
