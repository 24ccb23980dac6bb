"""With `use_orig_params=True`: modules that refuse to run while the unit that holds their parameters is sharded.

Their parameters are then 1-D slices, and torch's layers would fail on those in words of their own ("weight must be
2-D"), or, where a slice happens to fit, compute nonsense. Without `use_orig_params` the stand-ins refuse
(`unit.Absent`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from minifsdp.flat_param import Place
from minifsdp.fsdp.unit import SHARDED, sharded_error
from minifsdp.fsdp.whole import WholeUnit

KEY: Any = "fsdp: sharded"


class GuardedUnit(WholeUnit):
    """Hangs a hook before the forward of its modules, there only while it is sharded: a whole unit pays nothing."""

    def _adopt(self, leaves: list[nn.Parameter], places: list[list[Place]]) -> None:
        names: dict[nn.Module, list[str]] = {}
        for place in (place for users in places for place in users):
            names.setdefault(place.module, []).append(place.name)
        self._guards = [(m._forward_pre_hooks, partial(self._refuse, ", ".join(names[m]))) for m in names]
        super()._adopt(leaves, places)

    def _refuse(self, names: str, module: nn.Module, inputs: Any) -> None:
        raise sharded_error(f"{type(module).__name__}.forward", names, self)

    def _show(self) -> None:
        super()._show()
        self._take_down()

    def _hide(self) -> None:
        super()._hide()
        self._put_up()

    def expose(self, full: Tensor) -> None:
        super().expose(full)
        self._take_down()

    def conceal(self) -> None:
        super().conceal()
        if self.state is SHARDED:
            self._put_up()

    def _put_up(self) -> None:
        for hooks, guard in self._guards:
            hooks[KEY] = guard

    def _take_down(self) -> None:
        for hooks, _ in self._guards:
            hooks.pop(KEY, None)
