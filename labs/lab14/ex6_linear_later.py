"""Exercise 14.6: Split the backward."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect, same
from minifsdp.course.workshop.references import reference
from minifsdp.pipeline import weights

from .shared import EXACT, randn

Later = list[Callable[[], None]]


@reference(
    "14.6",
    hints=(
        "y = x w^T + b. Which of the three gradients does another rank wait for? The other two need x and the "
        "gradient of y: keep both until they are computed.",
        "In `backward`, return `gradient @ weight, None, None`, with None first where `ctx.needs_input_grad[0]` is "
        "False. Append a function that adds `rows.T @ x_rows` to `weight.grad` and `rows.sum(0)` to `bias.grad`, where "
        "`rows = gradient.flatten(0, -2)`. Use `x.detach()`: outside the backward pass, autograd would record the "
        "matmul.",
    ),
    forbids=(weights._Linear.backward, weights._forward, weights._accumulate),
)
def linear_later(later: Later) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return `linear(x, weight, bias)`, which is F.linear with a backward pass in two parts.

    Its backward pass computes the gradient of x, if x needs one, and appends one function without arguments to
    `later`. That function computes the gradients of weight and bias and adds them to `.grad`, which may be None; a new
    `.grad` has its own memory. The functions in `later` are called after the backward pass, in any order. Each matmul
    is computed once.

    x: [.., in], with at least two dimensions. weight: [out, in] and bias: [out] are parameters that need gradients.
    """

    def add(parameter: Tensor, gradient: Tensor) -> None:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight, bias)
            return F.linear(x, weight, bias)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, weight, bias = ctx.saved_tensors
            rows, x_rows = gradient.flatten(0, -2), x.detach().flatten(0, -2)

            def finish() -> None:
                add(weight, rows.T @ x_rows)
                add(bias, rows.sum(0))

            later.append(finish)
            return gradient @ weight if ctx.needs_input_grad[0] else None, None, None

    return Linear.apply


OUT, IN = 3, 7


def inputs(variant, seed=0):
    """x, weight, bias, and the gradient of the output."""
    shapes = ((2, variant.size, IN), (OUT, IN), (OUT,), (2, variant.size, OUT))
    return [randn(*shape, seed=100 * variant.seed + 10 * seed + n) for n, shape in enumerate(shapes)]


class Sums(TorchDispatchMode):
    """Counts sums, which are no products of matrices: one of them is the gradient of a bias."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten.sum
        return func(*args, **kwargs or {})


class Matmuls(TorchDispatchMode):
    """Knows what has been multiplied by the size of the result, to name it."""

    KINDS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)

    def __init__(self, rows):
        super().__init__()
        self.names = {rows * OUT: "the output", rows * IN: "the gradient of x", OUT * IN: "the gradient of the weight"}
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if func.overloadpacket in self.KINDS:
            self.made.append(self.names.get(result.numel(), "another matmul"))
        return result

    def slip(self, wanted):
        """What is computed although it is not `wanted`, or more than once."""
        if extra := [name for name in self.made if name != wanted]:
            second = {
                "the output": "no second forward pass: x and the gradient of y are enough",
                "the gradient of x": "the gradient of x belongs to the backward pass",
                "the gradient of the weight": "the matmul of the gradient and x runs in the backward pass: only the "
                "addition is left for later",
            }
            return second.get(extra[0], "one matmul is needed here")
        return f"each matmul is computed once, and {wanted} is computed {len(self.made)} times" if self.made else None


def calls_of(later, backwards):
    """The functions that the backward passes have postponed: one each."""
    if strange := [each for each in later if not callable(each)]:
        raise AnswerError(f"later: expected functions without arguments, got {describe(strange[0])}")
    slip = "one function for both gradients: W is one action"
    if len(later) < backwards:
        slip = "each backward appends one, whether x needs a gradient or not, and leaves those of others where they are"
    expect(f"functions in `later`, number of backward passes: {backwards}", len(later), backwards, slip=slip)
    calls = list(later)
    later.clear()
    return calls


@check("14.6")
def check_linear_later(answer, variant):
    """The gradient of x at once, those of weight and bias when they are asked for; nothing is computed twice."""
    x, weight, bias, gradient = inputs(variant)
    product = 2 * gradient.numel() * IN  # floating-point operations of one of the two products
    later = []
    linear = answer(later)
    if not callable(linear):
        raise AnswerError(f"expected a function of x, weight and bias, got {describe(linear)}")
    leaf, w, b = (nn.Parameter(each.clone()) for each in (x, weight, bias))
    with FlopCounterMode(display=False) as counter, Matmuls(2 * variant.size) as matmuls:
        y = linear(leaf * 1, w, b)
    slips = {"the bias is missing": F.linear(x, weight)}
    EXACT("the output", y.detach() if isinstance(y, Tensor) else y, F.linear(x, weight, bias), slips=slips)
    slip = "the forward pass has put something into `later`: the gradient of y is not there yet"
    expect("functions in `later` after forward", len(later), 0, slip=slip)
    if not y.requires_grad:
        raise AnswerError("the output has no gradient\nlikely slip: return `apply` of an autograd function")
    expect("floating-point operations of forward", counter.get_total_flops(), product, slip=matmuls.slip("the output"))
    given = gradient.clone()
    with FlopCounterMode(display=False) as counter, Sums() as sums, Matmuls(2 * variant.size) as matmuls:
        y.backward(given)
    check_backward(leaf.grad, gradient @ weight, (w, b), later)
    slip = matmuls.slip("the gradient of x")
    expect("floating-point operations of backward", counter.get_total_flops(), product, slip=slip)
    slip = "the gradient of the bias is computed in the backward pass: only the addition is left for later"
    expect("sums in backward", sums.count, 0, slip=slip)
    check_later(calls_of(later, 1), (w, b), gradients_of(x, gradient), product)
    expect("the gradient of y afterwards", given, gradient, slip="it is the caller's: do not change it")
    expect("x afterwards", leaf.detach(), x, slip="x is the caller's: do not change it")
    for name, parameter, before in (("weight", w, weight), ("bias", b, bias)):
        slip = "only the optimizer changes parameters"
        expect(f"the {name} afterwards", parameter.detach(), before, slip=slip)
    check_three(answer, variant)
    check_layers(answer, variant)
    check_two_lists(answer, variant)
    check_shapes(answer, weight, bias)
    check_one_row(answer, weight, bias)


def check_backward(got, wanted, parameters, later):
    """The gradients that the backward pass has computed, and the functions that it has postponed."""
    if None in later:
        raise AnswerError("`later` has None\nlikely slip: append the function, not what it returns")
    w, b = parameters
    left = "nothing was postponed: the gradients of the weights are computed in the backward pass"
    expect("weight.grad after backward", None if w.grad is None else "a gradient", None, slip=left)
    slip = "the weight's gradient is postponed, the bias's is not: backward returns None for both"
    expect("bias.grad after backward", None if b.grad is None else "a gradient", None, slip=slip)
    slip = "the gradient of x is postponed, too, but the previous stage waits for it"
    slips = {slip: torch.zeros_like(wanted), "backward returns it first: the previous stage waits for it": None}
    EXACT("x's gradient after backward", got, wanted, slips=slips)


def gradients_of(x, gradient):
    """The gradients of weight and bias."""
    rows = gradient.flatten(0, -2)
    return rows.T @ x.flatten(0, -2), rows.sum(0)


def check_later(calls, parameters, wanted, product):
    """The gradients that the postponed function computes, called once."""
    w, b = parameters
    with FlopCounterMode(display=False) as counter, Matmuls(product // (2 * OUT * IN)) as matmuls:
        try:
            for call in calls:
                call()
        except RuntimeError as error:
            if "size" not in str(error):
                raise
            slip = "one of x and the gradient of y has to be transposed, so that the result has the weight's shape"
            if f"'[{OUT}]'" in str(error):
                slip = "the gradient of the bias is the sum over all dimensions of the gradient of y except the last"
            raise AnswerError(f"a function of `later`: {error}\nlikely slip: {slip}") from error
    rows = product // (2 * OUT * IN)
    slips = {
        "this is the mean over the rows": wanted[0] / rows,
        "it is added twice": 2 * wanted[0],
        "the function computes the weight's gradient, too": None,
    }
    EXACT("weight.grad when all of `later` has been called", w.grad, wanted[0], slips=slips)
    slips = {
        "the bias is added to every row: its gradient is their sum, not their mean": wanted[1] / rows,
        "it is added twice": 2 * wanted[1],
        "the function computes the bias's gradient, too": None,
    }
    EXACT("bias.grad when all of `later` has been called", b.grad, wanted[1], slips=slips)
    slip = "autograd recorded the matmul, which keeps x's graph alive: `x.detach()`, or torch.no_grad()"
    expect("weight.grad has a graph", w.grad.requires_grad, False, slip=slip)
    slip = matmuls.slip("the gradient of the weight") or "one matmul is left for later, and none has been computed"
    expect("floating-point operations of `later`", counter.get_total_flops(), product, slip=slip)


def check_three(answer, variant):
    """Three micro-batches go forward, then backward in another order, one without a gradient of x; so do their W."""
    later, rows = [], 2 * variant.size
    linear = answer(later)
    batches = [inputs(variant, seed) for seed in (1, 2, 3)]
    parameters = [nn.Parameter(each.clone()) for each in batches[0][1:3]]
    outputs = [linear(batch[0].clone().requires_grad_(n != 1), *parameters) for n, batch in enumerate(batches)]
    for n in (1, 0, 2):
        gradient = batches[n][3]
        with FlopCounterMode(display=False) as counter:
            outputs[n].backward(gradient.transpose(0, 1).contiguous().transpose(0, 1))
        if n == 1:
            slip = "the first stage's x needs no gradient: `ctx.needs_input_grad` says so"
            expect("floating-point operations of a backward without x", counter.get_total_flops(), 0, slip=slip)
    found = dict(zip((1, 0, 2), calls_of(later, 3), strict=True))
    totals = [0.0, 0.0]
    for count, n in enumerate((0, 2, 1), 1):
        with FlopCounterMode(display=False) as counter, Matmuls(rows) as matmuls:
            found[n]()
        x, gradient = batches[n][0], batches[n][3]
        alone = gradients_of(x, gradient)
        mixes = [gradients_of(other[0], gradient) for other in batches if other[0] is not x]
        others = [gradients_of(batch[0], batch[3]) for m, batch in enumerate(batches) if m != n]
        for k, (name, parameter) in enumerate(zip(("weight", "bias"), parameters, strict=True)):
            before, wanted = totals[k], totals[k] + alone[k]
            slips = {
                f"`.grad` of the {name} was replaced: gradients of micro-batches add up": alone[k],
                "a function does the work of its own backward pass, not all the work in `later`": sum(
                    (other[k] for other in others), alone[k]
                ),
                f"it has not added to `.grad` of the {name}: each function does the work of its own backward pass": (
                    before if count > 1 else None
                ),
            }
            explained = {
                "this is the newest micro-batch's that was left: a function does the work of its own backward pass": (
                    others[-1:] if count == 1 else []
                ),
                "this is another micro-batch's: a function does the work of its own backward pass": others,
                "x is that of another forward pass: each backward pass needs its own, from `ctx`": mixes,
            }
            for text, values in explained.items():
                for value in values:
                    if same(parameter.grad, before + value[k], 1e-12):
                        slips.setdefault(text, before + value[k])
            slip = "each backward pass postpones the work of its own micro-batch: keep x and the gradient of each"
            what = f"{name}.grad when {count} of 3 functions have been called, that of micro-batch {n} last"
            EXACT(what, parameter.grad, wanted, slips=slips, slip=slip)
            totals[k] = wanted
        slip = matmuls.slip("the gradient of the weight")
        expect("floating-point operations of a function", counter.get_total_flops(), 2 * rows * OUT * IN, slip=slip)


def check_layers(answer, variant):
    """One function serves two layers, in two steps between which `.grad` is reset; float32."""
    later = []
    linear = answer(later)
    x, weight, bias, _ = (each.float() for each in inputs(variant, 4))
    first = nn.Parameter(weight), nn.Parameter(bias)
    second = nn.Parameter(weight.flip(0)), nn.Parameter(2 * bias)
    names = ("weight", "bias", "the second layer's weight", "the second layer's bias")
    for step in ("the first step", "a second step after `.grad` was set to None"):
        (linear(x, *first) * linear(x, *second)).sum().backward()
        for call in list(later):
            call()
        expect("functions in `later` when both have been called", len(later), 2, slip="`later` is the caller's")
        later.clear()
        loss = (F.linear(x, *first) * F.linear(x, *second)).sum()
        for name, parameter, wanted in zip(
            names, (*first, *second), torch.autograd.grad(loss, (*first, *second)), strict=True
        ):
            slip = "a function is for the parameters of its own call, however many layers and steps there are"
            expect(f"{name}.grad of two layers, {step}", parameter.grad, wanted, slip=slip, tolerance=1e-4)
            parameter.grad = None


def check_two_lists(answer, variant):
    """Two functions with a list each, used in turn."""
    x, weight, bias, gradient = inputs(variant, 5)
    lists = [], []
    linears = [answer(later) for later in lists]
    parameters = [(nn.Parameter(scale * weight), nn.Parameter(scale * bias)) for scale in (1, 2)]
    outputs = [linear(x, *pair) for linear, pair in zip(linears, parameters, strict=True)]
    for output in outputs:
        output.backward(gradient)
    slip = "a second `linear_later` has changed the first: each keeps its own `later`"
    expect("functions in the lists of two `linear_later`", [len(each) for each in lists], [1, 1], slip=slip)
    for later, pair in zip(lists, parameters, strict=True):
        for call in later:
            call()
        for name, parameter, wanted in zip(("weight", "bias"), pair, gradients_of(x, gradient), strict=True):
            EXACT(f"{name}.grad with two `linear_later`", parameter.grad, wanted, slip=slip)


def check_one_row(answer, weight, bias):
    """One row of x, twice with one gradient; in bfloat16, where sums of two are exact."""
    for dtype in (torch.float64, torch.bfloat16):
        x, gradient = randn(1, IN, seed=9).to(dtype), randn(1, OUT, seed=10).to(dtype)
        later, given = [], gradient.clone()
        linear, w, b = answer(later), nn.Parameter(weight.to(dtype)), nn.Parameter(bias.to(dtype))
        for _ in range(2):
            linear(x, w, b).backward(given)
        where = f"of one row, twice, in {str(dtype).removeprefix('torch.')}"
        slip = "bias.grad is a view of the gradient of y, which later additions would change: it needs its own memory"
        for call in later:
            call()
            aliased = b.grad is not None and b.grad.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
            expect(f"bias.grad {where} shares memory with the gradient of y", aliased, False, slip=slip)
        expect(f"the gradient of y {where}", given, gradient, slip=slip)
        for name, parameter, wanted in zip(("weight", "bias"), (w, b), gradients_of(x, gradient), strict=True):
            EXACT(f"{name}.grad {where}", parameter.grad, 2 * wanted)


def check_shapes(answer, weight, bias):
    """x with two dimensions, and with four, which are not contiguous."""
    for shape in ((6,), (2, 3, 4)):
        x = randn(*shape, IN, seed=7).transpose(0, -2).contiguous().transpose(0, -2)
        gradient = randn(*shape, OUT, seed=8)
        where = f"x of shape {list(x.shape)}, " + ("contiguous" if x.is_contiguous() else "not contiguous")
        slip = "x has two dimensions or more, in any layout: flatten all but the last, by `flatten(0, -2)`"
        w, b, later = nn.Parameter(weight.clone()), nn.Parameter(bias.clone()), []
        try:
            answer(later)(x, w, b).backward(gradient)
            for call in later:
                call()
        except (RuntimeError, IndexError, ValueError) as error:
            raise AnswerError(f"{where}: {error}\nlikely slip: {slip}") from error
        for name, parameter, wanted in zip(("weight", "bias"), (w, b), gradients_of(x, gradient), strict=True):
            EXACT(f"{name}.grad, {where}", parameter.grad, wanted, slip=slip)
