"""Outputs of a module, and both its inputs and outputs, moved to other layouts (prepare.py has the inputs)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from minifsdp.tensor_parallel.layouts import Layout
from minifsdp.tensor_parallel.parameters import Ranks
from minifsdp.tensor_parallel.prepare import Layouts, PrepareModuleInput, check_lengths, moved, several


@dataclass(kw_only=True)
class PrepareModuleOutput(ParallelStyle):
    """Moves a module's outputs.

    Attributes:
        output_layouts: the layouts of plain outputs; None instead of a layout leaves an output unchanged.
        desired_output_layouts: the layouts in which the caller receives them, the same number.
        use_local_output: return this rank's parts as plain tensors, instead of DTensors.

    Raises:
        ValueError: the numbers of given and desired layouts differ; or, in forward, those of layouts and outputs.
    """

    output_layouts: Layouts
    desired_output_layouts: Layouts
    use_local_output: bool = True

    def __post_init__(self) -> None:
        self.output_layouts, desired = several(self.output_layouts), several(self.desired_output_layouts)
        self.desired_output_layouts = desired
        check_lengths("output_layouts", self.output_layouts, "desired_output_layouts", desired)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = Ranks.of(device_mesh, module)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            outputs = output if isinstance(output, tuple) else (output,)
            given, desired = self.output_layouts, self.desired_output_layouts
            results = moved(outputs, given, desired, ranks, self.use_local_output, "output")
            return results[0] if len(results) == 1 else results

        module.register_forward_hook(after)
        return module


@dataclass(kw_only=True)
class PrepareModuleInputOutput(ParallelStyle):
    """Both styles above; `use_local_input` is the `use_local_output` of the first."""

    input_layouts: Layouts = None
    desired_input_layouts: Layouts = None
    input_kwarg_layouts: dict[str, Layout] | None = None
    desired_input_kwarg_layouts: dict[str, Layout] | None = None
    use_local_input: bool = False
    output_layouts: Layouts
    desired_output_layouts: Layouts
    use_local_output: bool = True

    def __post_init__(self) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=self.input_layouts,
            desired_input_layouts=self.desired_input_layouts,
            input_kwarg_layouts=self.input_kwarg_layouts,
            desired_input_kwarg_layouts=self.desired_input_kwarg_layouts,
            use_local_output=self.use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=self.output_layouts,
            desired_output_layouts=self.desired_output_layouts,
            use_local_output=self.use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)
