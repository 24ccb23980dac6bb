"""Ranks started by Ray Train on a CPU: python scripts/ray_train.py OUT. OUT is an absolute path."""

import sys
from pathlib import Path

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train_on_a_rank(config: dict[str, str]) -> None:
    """Runs on each rank, in a thread and in a folder of Ray's own, after Ray has initialized the process group."""
    from minifsdp.course import train

    settings = train.TrainSettings(layers=2, width=8, context=8, batch=12, steps=4, ledger=False)
    record = train.run(train.check(settings, "cpu", Path(config["out"])), lambda step, steps, loss: None)
    if record is not None:  # rank 0
        print("final loss", record["final_loss"])


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(
        train_on_a_rank,
        train_loop_config={"out": sys.argv[1]},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()
