"""Exercise 0.3: The Adam step."""

import torch
from torch import Tensor, nn
from torch.optim import adam

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference


@reference(
    "0.3",
    hints=(
        "`state` is empty at the first call only: fill it then, with `zeros_like(param)` twice. Convert the gradient "
        'to `param.dtype` before anything else, and take the count out with `state["step"].item()`.',
        "`exp_avg.lerp_(grad, 1 - beta1)`; `exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)`; then divide "
        "`exp_avg` by `1 - beta1**t`, `exp_avg_sq` by `1 - beta2**t`, and "
        "`param.addcdiv_(m_hat, v_hat.sqrt() + eps, value=-lr)`.",
    ),
    forbids=(adam.adam,),
)
def adam_step(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> None:
    """Perform one step of Adam on one parameter. Called under `torch.no_grad()`.

    Update every tensor in place and make no second copy, because other references to it must see the change.

    Args:
        param: [any shape], updated.
        grad: [the same shape], only read; its precision may be lower, so compute in param's dtype.
        state: empty at the parameter's first step, which fills it; later, as the previous step left it:
            "step": scalar float32 on the CPU, the number of steps taken, including this one;
            "exp_avg", "exp_avg_sq": shape, dtype and device of param.
        lr, beta1, beta2, eps: as in the formulas.
    """
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)
    grad = grad.to(param.dtype)
    state["step"] += 1
    t = state["step"].item()
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = state["exp_avg_sq"].sqrt() / (1 - beta2**t) ** 0.5
    param.addcdiv_(state["exp_avg"], root + eps, value=-lr / (1 - beta1**t))


@check("0.3")
def check_adam_step(answer, variant):
    """Adam's values at every step, all in place, with state made at the first step in the parameter's dtype."""
    generator = torch.Generator().manual_seed(variant.seed)
    numel = max(2, variant.size)
    start = 0.01 * torch.randn(numel, generator=generator)
    sizes = torch.logspace(-9, 0, numel) * (-1.0) ** torch.arange(numel)  # eps matters to the smallest only
    grads = [sizes * (0.5 + torch.rand(numel, generator=generator)) for _ in range(4)]
    default = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    other = {"lr": 5e-2, "beta1": 0.8, "beta2": 0.99, "eps": 1e-7}
    _follow("float32 gradients", answer, start, grads, default, default)
    _follow("other lr, betas and eps", answer, start, grads, other, default)
    _follow("bfloat16 gradients", answer, start, [grad.bfloat16() for grad in grads], other, default)
    double = [grad.double().view(1, -1) for grad in grads]
    _follow("float64, of shape [1, numel]", answer, start.double().view(1, -1), double, other, default)
    columns = lambda values: values.repeat(2).view(2, -1).t().contiguous().t()  # noqa: E731
    grids = [columns(grad) for grad in grads]
    _follow("two dimensions that lie in memory in columns", answer, columns(start), grids, other, default)
    _follow("a scalar parameter, of shape []", answer, start[-1], [grad[-1] for grad in grads], other, default)
    elsewhere, state = nn.Parameter(torch.empty(numel, device="meta")), {}  # as on a GPU
    try:
        with torch.no_grad():
            answer(elsewhere, torch.empty(numel, device="meta"), state)
    except RuntimeError as error:
        said = f"a parameter on another device, meta: {str(error).splitlines()[0]}"
        raise AnswerError(
            f"{said}\nlikely slip: the moments are on param's device, the step count is on the CPU"
        ) from None
    slip = "the moments are where param is; the step count is on the CPU, where reading it waits for no GPU"
    devices = {"exp_avg": "meta", "exp_avg_sq": "meta", "step": "cpu"}
    expect(
        "devices of the state of a parameter on meta", {n: str(state[n].device) for n in devices}, devices, slip=slip
    )


def _follow(case, answer, start, grads, options, default):
    """Run the answer step by step on a parameter that requires grad, as an optimizer would, and look at everything."""
    param, state = nn.Parameter(start.clone(memory_format=torch.preserve_format)), {}
    places = {"param": param.data_ptr()}
    for number, grad in enumerate(grads, start=1):
        given = grad.clone()
        with torch.no_grad():
            answer(param, given, state, **options)
        at = f"{case}, step {number}"
        _expect_state(at, state, start, number)
        slip = "grad was written to: it belongs to the parameter, and may be added to later"
        expect(f"{at}: grad afterwards", given, grad, slip=slip)
        _expect_values(at, param.detach(), state, start, grads[:number], options, default)
        now = {
            "param": param.data_ptr(),
            **{name: state[name].data_ptr() for name in ("exp_avg", "exp_avg_sq", "step")},
        }
        for name, place in places.items():
            slip = f"{name} is a new tensor: write into the old one, with operators that end in _"
            expect(f"{at}: {name} is where it was", now[name] == place, True, slip=slip)
        places = now


def _expect_state(at, state, start, number):
    if sorted(state) != ["exp_avg", "exp_avg_sq", "step"]:
        raise AnswerError(f"{at}: expected the tensors exp_avg, exp_avg_sq and step in state, got {sorted(state)}")
    for name, value in state.items():
        slip = f"{name} is a tensor{'; for a count of 0 it is torch.zeros(())' if name == 'step' else ''}"
        expect(f"{at}: type of state[{name!r}]", type(value).__name__, "Tensor", slip=slip)
    kinds = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in sorted(state.items())}
    moments = (list(start.shape), str(start.dtype))
    wanted = {name: ([], "torch.float32") if name == "step" else moments for name in sorted(state)}
    slip = "moments have shape and dtype of param, whatever the gradient's; step is a float32 scalar"
    expect(f"{at}: shapes and dtypes of the state", kinds, wanted, slip=slip)
    slip = "the state takes part in no gradient, requires_grad is False"
    expect(f"{at}: state that requires grad", [name for name in state if state[name].requires_grad], [], slip=slip)
    anew = {"the state is made anew at every call: make it only where `state` is empty": 1.0} if number > 1 else {}
    late = {"count the step before you use the count": number - 1.0}
    expect(f"{at}: step", float(state["step"]), float(number), slips={**anew, **late})


def _expect_values(at, param, state, start, grads, options, default):
    right, mean, square = _adam(start, grads, **options)
    swapped = {**options, "beta1": 1 - options["beta1"], "beta2": 1 - options["beta2"]}
    formulas = {
        "param is as it was: `param = ...` names a new tensor, write into the old one": (start, None, None),
        "lr, beta1, beta2 and eps are arguments: these are the values for the defaults": _adam(start, grads, **default),
        "beta is the weight of the old moment, 1 - beta that of the gradient": _adam(start, grads, **swapped),
        "the square is taken in bfloat16: convert the gradient first": _adam(start, grads, **options, narrow=True),
        "eps stands under the root: it is added outside": _adam(start, grads, **options, eps_at="inside"),
        "eps is added before the bias is corrected: correct exp_avg_sq, take the root, then add eps": _adam(
            start, grads, **options, eps_at="early"
        ),
        "no bias correction: exp_avg / (1 - beta1**step), exp_avg_sq / (1 - beta2**step)": _adam(
            start, grads, **options, correct=False
        ),
        "the step goes uphill": (2 * start - right, None, None),
    }
    slips = [{words: values[i] for words, values in formulas.items()} for i in range(3)]
    fine = start.dtype == torch.float64
    slip = (
        "the arithmetic is that of float32: convert the gradient to param's dtype, whatever that is" if fine else None
    )
    tolerance = 1e-12 if fine else 1e-5
    expect(f"{at}: exp_avg", state["exp_avg"], mean, slips=slips[1], slip=slip, tolerance=tolerance)
    rounded = 10 * tolerance  # 1 - beta2 has few digits left where it is taken in float32
    expect(f"{at}: exp_avg_sq", state["exp_avg_sq"], square, slips=slips[2], slip=slip, tolerance=rounded)
    expect(f"{at}: param", param, right, slips=slips[0], slip=slip, tolerance=10 * tolerance)


def _adam(start, grads, lr, beta1, beta2, eps, eps_at="outside", correct=True, narrow=False):
    """Algorithm 1 of the paper in float64: param, exp_avg and exp_avg_sq after the last gradient, in param's dtype."""
    param, mean, square = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    for t, grad in enumerate(grads, start=1):
        mean = beta1 * mean + (1 - beta1) * grad.double()
        square = beta2 * square + (1 - beta2) * ((grad * grad).double() if narrow else grad.double() ** 2)
        bias1, bias2 = (1 - beta1**t, 1 - beta2**t) if correct else (1.0, 1.0)
        if eps_at == "inside":
            root = (square / bias2 + eps).sqrt()
        elif eps_at == "early":
            root = (square.sqrt() + eps) / bias2**0.5
        else:
            root = (square / bias2).sqrt() + eps
        param = param - lr * (mean / bias1) / root
    return param.to(start.dtype), mean.to(start.dtype), square.to(start.dtype)
