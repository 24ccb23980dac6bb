"""minifsdp: DDP, ZeRO and FSDP built one small step at a time."""
