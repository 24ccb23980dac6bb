"""Exercise 5.1: When each hook fires."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from minifsdp.course.workshop.checking import AnswerError, check
from minifsdp.course.workshop.references import reference

from .shared import compare_events


@reference(
    "5.1",
    hints=(
        "A module has `register_forward_pre_hook` and `register_forward_hook`, a tensor `register_hook`, a parameter "
        "`register_post_accumulate_grad_hook`. A backward's end has no hook: it is a callback, queued in mid-backward.",
        "In the forward hook register one on the output. In the output's hook record, and, unless one is queued in "
        "this backward already, `Variable._execution_engine.queue_callback(end)`. In a loop over parameters give each "
        "hook its own name: `lambda p, name=name: record(...)`.",
    ),
)
def watch(module: nn.Module, record: Callable[[str], None]) -> None:
    """Register hooks on `module` that call `record` at each event of every forward and backward pass.

    Args:
        module: a module that returns one tensor; it may run several times per forward pass, or under `torch.no_grad()`,
            where its output cannot carry a hook (`output.requires_grad` is False).
        record: call it with "pre-forward" and "post-forward" at each call, with "output gradient" for each output that
            receives a gradient, with "gradient of NAME" once NAME's gradient is in its `.grad` (NAME as in
            `module.named_parameters()`), and with "end of backward" once per backward pass that reaches the module.
    """
    queued = False

    def end() -> None:
        nonlocal queued
        queued = False
        record("end of backward")

    def on_output(gradient: Tensor) -> None:
        nonlocal queued
        record("output gradient")
        if not queued:
            queued = True
            Variable._execution_engine.queue_callback(end)

    def post_forward(module: nn.Module, args: Any, output: Tensor) -> None:
        record("post-forward")
        if output.requires_grad:
            output.register_hook(on_output)

    module.register_forward_pre_hook(lambda module, args: record("pre-forward"))
    module.register_forward_hook(post_forward)
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: record(f"gradient of {name}"))


class Middle(nn.Module):
    """What is watched: two layers, so that its gradients do not come all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


ENDS_TWICE = (
    "the callback is queued once per output: queue it once per backward, whatever the number of outputs that get a "
    "gradient"
)
TOO_EARLY = (
    "`p.register_hook` sees a gradient before it is in `.grad`; `register_post_accumulate_grad_hook` runs when it is "
    "there, and once, however often the parameter was used"
)
END_EARLY = (
    "the last parameter of this module is not the end of backward, the modules before it still follow: let "
    "`queue_callback` tell"
)
NO_PARAMETERS = (
    "a module's backward hook runs when the gradients of its inputs are known and says nothing of its parameters: they "
    "need a hook each"
)


@check("5.1")
def check_watch(answer, variant):
    """Every event in its place, in two steps, with the module called twice, and in evaluation."""
    for calls in (1, 2):
        watched, expected = Middle(), Middle()
        for step in ("first step", "second step"):
            got, wanted = events_of(watched, answer, calls, step), events_of(expected, observe, calls, step)
            wanted_and_calls = "" if calls == 1 else ", the module called twice in it"
            compare_events(f"{step}{wanted_and_calls}", got, wanted, why_watch(got, wanted))
    for what, run in MORE.items():
        got, wanted = events_in(watched, run), events_in(expected, run)
        compare_events(what, got, wanted, SLIPS.get(what) or why_watch(got, wanted))
    frozen, expected = nn.Tanh(), nn.Tanh()
    for module, attach in ((frozen, answer), (expected, observe)):
        module.log = []
        attach(module, module.log.append)
    compare_events("a module that trains nothing", events_in(frozen, alone), events_in(expected, alone), NO_GRADIENT)
    compare_events("two modules in one model", *(side_by_side(by) for by in (answer, observe)), SHARED)


def events_of(module, attach, calls, step):
    """What `module` records in one step of a model that has it in its middle; it is hooked in the first."""
    first, last = nn.Linear(3, 3), nn.Linear(3, 3)
    if step == "first step":
        module.log = []
        result = attach(module, lambda event: module.log.append(described(event, module, first)))
        module.result = result
    module.log.clear()
    module.first = [first]  # in a list, so that it is no submodule
    last.weight.register_post_accumulate_grad_hook(lambda p: module.log.append("(the layer behind has its gradient)"))
    first.weight.register_post_accumulate_grad_hook(lambda p: module.log.append("(the layer before has its gradient)"))
    x = first(torch.ones(2, 3))
    for _ in range(calls):
        x = module(x)
    last(x).sum().backward()
    return list(module.log)


def events_in(module, run):
    module.log.clear()
    run(module)
    return list(module.log)


def in_evaluation(module):
    with torch.no_grad():
        alone(module)


def alone(module):
    try:
        module(torch.ones(2, 3))
    except RuntimeError as error:
        module.log.append(f"RuntimeError: {error}")


def in_eval_mode(module):
    module.eval()(torch.ones(2, 3)).sum().backward()
    module.train()


def one_by_one(module):
    first, second = module(torch.ones(2, 3)), module(torch.ones(2, 3))
    second.sum().backward()
    first.sum().backward()


MORE = {
    "under torch.no_grad()": in_evaluation,
    "in eval mode, with a backward": in_eval_mode,
    "called twice, and then a backward of each": one_by_one,
}
SLIPS = {
    "in eval mode, with a backward": "`module.training` says nothing of a backward: `output.requires_grad` does",
    "called twice, and then a backward of each": "the end belongs to each backward: queue it at the first of its "
    "outputs' gradients, whichever call that is, and let the flag fall at the end",
}
NO_OUTPUT = (
    "the output has no hook: register one on it in the forward hook; its gradient begins the module's backward, and is "
    "where the callback is queued"
)
NO_GRADIENT = "an output without a gradient cannot be hooked: ask `output.requires_grad`, whatever mode it is"
SHARED = "each watched module has a state of its own: a default argument is made once, and shared by all calls"


def side_by_side(attach):
    """What two watched modules record in one step, one after the other."""
    modules = [Middle(), Middle()]
    for module in modules:
        module.log = []
        attach(module, module.log.append)
    modules[1](modules[0](torch.ones(2, 3))).sum().backward()
    return modules[0].log + modules[1].log


def described(event, module, first):
    """The event, and whether the gradient that it speaks of is there."""
    if not isinstance(event, str):
        raise AnswerError(f"record() takes the event's name, a str; it got an object of type {type(event).__name__}")
    parameters = dict(module.named_parameters())
    p = parameters.get(event.removeprefix("gradient of "))
    if event.startswith("gradient of ") and p is not None and p.grad is None:
        return f"{event}, which is not in .grad yet"
    return event


def observe(module, record):
    """The same by other means: a counter of what is in flight in place of a flag."""
    state = {"backward": -1}

    def on_output(gradient):
        record("output gradient")
        task = torch._C._current_graph_task_id()
        if state["backward"] != task:
            state["backward"] = task
            Variable._execution_engine.queue_callback(lambda: record("end of backward"))

    def post_forward(module, args, output):
        record("post-forward")
        if output.requires_grad:
            output.register_hook(on_output)

    def name_of(p):
        return next(name for name, each in module.named_parameters() if each is p)

    module.register_forward_pre_hook(lambda module, args: record("pre-forward"))
    module.register_forward_hook(post_forward)
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(lambda p: record(f"gradient of {name_of(p)}"))


def why_watch(got, wanted):
    ours, theirs = Counter(wanted), Counter(got)
    if any("not in .grad yet" in event for event in got):
        return TOO_EARLY
    if any(event.startswith("RuntimeError") for event in got):
        return NO_GRADIENT
    gradients = [event for event in got if event.startswith("gradient of ")]
    if any(theirs[event] > ours[event] for event in gradients):
        return "each hook needs its own name: a lambda made in a loop sees the loop's last one unless you bind it"
    if theirs["end of backward"] > ours["end of backward"]:
        return ENDS_TWICE
    if not gradients:
        return NO_PARAMETERS
    if "end of backward" in got and got[-1] != "end of backward":
        return END_EARLY
    if "output gradient" in ours and "output gradient" not in theirs:
        return NO_OUTPUT
    if theirs["end of backward"] < ours["end of backward"]:
        return "the end of backward is missing: reset the flag that prevents a second callback once backward has ended"
    if theirs["output gradient"] < ours["output gradient"]:
        return "every call of the module has an output of its own: hook each, in the forward hook"
    return None
