"""The checks of lab 00."""

import gc
import weakref

import torch
from torch import nn

from minifsdp.course.workshop.checking import AnswerError, check, expect

STATE_BUFFERS = {"sgd": 0, "momentum": 1, "adam": 2, "amsgrad": 3}
STAGES = ("replicated", "stage 1", "stage 2", "stage 3")


@check("0.1")
def check_training_bytes(answer, variant):
    """Exact bytes for SGD, momentum, Adam and AMSGrad, in float32, in bfloat16 and with a float32 copy."""
    few = variant.size
    numels = [few, 5 * few + 1, 64, few, few, 1]  # three of one size, one of one element, and in no order
    for itemsize, copy in ((4, False), (2, False), (2, True), (4, True), (8, False), (1, False)):
        for optimizer in STATE_BUFFERS:
            given = list(numels)
            found = answer(given, itemsize, optimizer, copy) if copy else answer(given, itemsize, optimizer)
            case = f"{optimizer}, parameters of {itemsize} bytes{', float32 copy' if copy else ''}"
            expect(f"{case}: `numels` afterwards", given, numels, slip="it is the caller's list: leave it as it is")
            if not isinstance(found, dict) or list(found) != ["parameters", "gradients", "optimizer"]:
                raise AnswerError(f"{case}: expected a dict with parameters, gradients, optimizer, got {found!r}")
            _expect_bytes(case, found, numels, itemsize, optimizer, copy)


def _expect_bytes(case, found, numels, itemsize, optimizer, copy):
    elements, tensors = sum(numels), len(numels)
    buffers, counts = STATE_BUFFERS[optimizer], 4 * tensors * (STATE_BUFFERS[optimizer] > 1)
    updated = 4 if copy else itemsize  # bytes of an element of what the optimizer updates
    held = itemsize * elements
    state = elements * (buffers * updated + 4 * copy) + counts
    copied = {"the float32 copy is the optimizer's, not a second set of parameters": held + 4 * elements}
    expect(f"{case}: parameters, bytes", found["parameters"], held, slips=copied)
    wide = {"gradients have the dtype of the parameters that forward used": 4 * elements}
    expect(f"{case}: gradients, bytes", found["gradients"], held, slips=wide)
    slips = {}
    if counts:
        slips["each parameter tensor has a step count of 4 bytes beside its buffers"] = state - counts
        slips["the step count is per parameter tensor, not one for the model"] = state - counts + 4
        slips["a step count has 4 bytes, whatever the dtype of the parameters"] = state - counts + itemsize * tensors
        slips["the step count is one number per tensor, not one per element"] = state - counts + 4 * elements
        slips["two tensors of one size are two tensors, and have a step count each"] = state - 8
        slips["a tensor of one element is a tensor, and has a step count"] = state - 4
    else:
        slips["SGD counts no steps: only Adam and AMSGrad keep a step count"] = state + 4 * tensors
    if copy:
        slips["the float32 copy of the parameters is missing: 4 bytes per element"] = state - 4 * elements
        slips["state is float32 here: the optimizer updates the copy, so its buffers have the copy's dtype"] = (
            elements * (buffers * itemsize + 4) + counts
        )
    elif itemsize != 4:
        slips["state has the dtype of the parameters: without a float32 copy nothing is float32"] = (
            elements * buffers * 4 + counts
        )
    if not copy:
        slips["no copy is asked for: `master_copy` is False by default"] = elements * 4 * (buffers + 1) + counts
    slips[f"{optimizer} has {buffers} buffers as large as the parameter"] = state - updated * elements
    slip = "an element of a buffer has as many bytes as one of the tensor that the optimizer updates, be it 1"
    expect(f"{case}: optimizer state, bytes", found["optimizer"], state, slips=slips, slip=slip)


@check("0.2")
def check_zero_stages(answer, variant):
    """Each stage divides one more of the three terms by the ranks, for any K and item size."""
    given = (100 * variant.size, variant.ranks, 12, 2)
    for psi, ranks, k, itemsize in ((50, 64, 12, 2), (100, 8, 8, 4), given, (100, 4, 0, 1), (100, 1, 8, 4)):
        by_default = (k, itemsize) == (12, 2)
        found = answer(psi, ranks) if by_default else answer(psi, ranks, k=k, itemsize=itemsize)
        if not isinstance(found, dict) or list(found) != list(STAGES):
            raise AnswerError(f"expected a dict with {', '.join(STAGES)}, in this order, got {found!r}")
        one, state = itemsize * psi, k * psi
        for stage in STAGES:
            right = _held(stage, one, state, ranks)
            slips = {
                "the gradients are missing: they are as large as the parameters": _held(stage, one, state - one, ranks)
                if stage == "replicated"
                else right - one / (1 if stage == "stage 1" else ranks),
                "K is an argument: 12 is Adam's with a float32 copy": _held(stage, one, 12 * psi, ranks),
                "itemsize is an argument: parameters and gradients are not always 2 bytes": _held(
                    stage, 2 * psi, state, ranks
                ),
                "k and itemsize are arguments: 12 and 2 belong to Adam in mixed precision": _held(
                    stage, 2 * psi, 12 * psi, ranks
                ),
                "K includes the float32 copy already": _held(stage, one, state + 4 * psi, ranks),
                "a shard has exactly 1 / N of the bytes: divide with /, without rounding": float(int(right)),
                "the stages build on each other: what a stage has sharded stays sharded in the next": {
                    "stage 2": one + one / ranks + state,
                    "stage 3": one / ranks + one + state,
                }.get(stage, -1.0),
                "the optimizer state is sharded first, the parameters last": one + one / ranks + state,
                "there are N shards, and a rank keeps one of them: divide by N": _held(
                    stage, one, state, max(1, ranks - 1)
                ),
                "bytes of one rank are asked for, not of all together": right * ranks,
                "exact bytes are asked for: do not round": round(right, 1),
                "bytes are asked for, not GiB": right / 2**30,
                "bytes are asked for, not GB": right / 1e9,
            }
            where = f"{stage}, Ψ = {psi:,}, N = {ranks}, K = {k}, {itemsize} bytes per element: bytes"
            expect(where, found[stage], right, slips=slips)


def _held(stage, one, state, ranks):
    """Bytes on a rank: parameters and gradients of `one` byte count each, and `state`, as far as they are sharded."""
    terms, sharded = [state, one, one], STAGES.index(stage)
    return float(sum(terms[:sharded]) / ranks + sum(terms[sharded:]))


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


class Gated(nn.Module):
    """[rows, width] -> the same; a third of `up`'s output is unused, and one tensor is saved by two operators.

    Remembers, without keeping it alive, the memory of what forward has made.
    """

    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * inner), nn.Linear(inner, width)

    def forward(self, x):
        value, gate, _ = self.up(x).chunk(3, dim=-1)
        opened = gate.sigmoid()
        product = value * opened
        y = self.down(product)
        self.made = [weakref.ref(tensor.untyped_storage()) for tensor in (value, opened, product, y)]
        return y


class Embedded(nn.Module):
    """[rows] of int64 -> [rows, width - 1] in float64; a part of a frozen weight, and a buffer of the table's shape."""

    def __init__(self, rows, width):
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.mix = nn.Parameter(torch.randn(width + 1, width), requires_grad=False)
        self.register_buffer("mask", torch.ones(rows, width))
        self.double()

    def forward(self, tokens):
        y = (self.table(tokens) * self.mask @ self.mix[1:]).exp()
        return y[:, 1:] * y[:, :-1]  # saves two views of one storage


@check("0.4")
def check_saved_bytes(answer, variant):
    """Every storage once and whole, no parameter, one forward; backward still works, and nothing is left behind."""
    torch.manual_seed(variant.seed)
    rows, width, inner = variant.size, 5, 3
    model, x = Gated(width, inner), torch.randn(rows, width)
    losses, ran = [], []

    def forward():
        ran.append(True)
        losses.append(model(x).square().mean())
        return losses[-1]

    model.eval()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    found = answer(forward, model)
    expect("calls of forward", len(ran), 1, slip="run forward once: each run saves its own tensors")
    left = {n: p.grad for n, p in model.named_parameters()}
    slip = "it only counts: gradients and modes of the model are the caller's, who runs backward"
    expect("gradients afterwards", left, {n: torch.ones_like(p) for n, p in model.named_parameters()}, slip=slip)
    expect("whether the model is in training mode afterwards", model.training, False, slip=slip)
    model.zero_grad()
    # x for up; the whole of up's output, of which `value` is a view; the sigmoid, for itself and the product; the
    # product for down; the output for the square.
    wanted = 4 * rows * (width + 3 * inner + inner + inner + width)
    double, part, weight = 4 * rows * inner, 4 * rows * 2 * inner, 4 * inner * width
    slips = {
        "the parameters are counted: they are there anyway": wanted + weight,
        "a tensor that two operators save is counted twice: count storages": wanted + double,
        "a view keeps its whole storage alive: count the storage's bytes": wanted - part,
        "views at their own size, and twice what two operators save: count storages": wanted - part + double,
        "everything is counted at every saving, parameters too (a weight is saved as a view of it: compare storages, "
        "not tensors)": wanted - part + double + weight,
        "elements against bytes": wanted // 4,
        "nothing was counted: hooks work on what runs inside their `with`": 0,
    }
    expect(f"bytes saved by a gated layer for {rows} rows", found, wanted, slips=slips)
    kept = sum(storage() is not None for storage in model.made)
    slip = "`pack` handed back a copy, which autograd then keeps beside what was counted: hand back the tensor's memory"
    expect("of four activations, those that the graph keeps", kept, 4, slip=slip)
    _expect_backward("a gated layer", losses.pop(), model, lambda: model(x).square().mean())
    answer(lambda: model(x).square().mean(), model)
    gc.collect()
    left = sum(storage.nbytes() for made in model.made if (storage := made()) is not None)
    slip = (
        "`pack` handed back the tensor itself, and graph and tensor keep each other alive: hand back tensor.detach(); "
        "or something outside still holds them"
    )
    expect("bytes of activations left once the loss is gone", left, 0, slip=slip)
    _expect_embedded(answer, rows, width)


def _expect_embedded(answer, rows, width):
    """What a model of floating point in 4 bytes does not show."""
    model, tokens = Embedded(rows, width), torch.arange(rows)
    losses = []
    found = answer(lambda: losses.append(model(tokens).sum()) or losses[-1], model)
    wanted = 8 * rows * (1 + width + width)  # the tokens, the buffer, and exp's output
    slips = {
        "a buffer is no parameter: where an operator saves it, it counts": wanted - 8 * rows * width,
        "a frozen parameter is one too, and a part of one is known by its storage: it is there anyway": wanted
        + 8 * (width + 1) * width,
        "an element has not always 4 bytes: ask the storage": wanted // 2,
        "indices are saved as well: what counts is memory, not floating point": wanted - 8 * rows,
    }
    slip = "parameters are known by their storage, and each call counts what it has seen itself"
    expect(f"bytes saved by an embedding of {rows} tokens in float64", found, wanted, slips=slips, slip=slip)
    _expect_backward("an embedding in float64", losses.pop(), model, lambda: model(tokens).sum())


def _expect_backward(what, loss, model, forward):
    """Twice through the graph that was counted, against once through another one, twice as long."""
    slip = "`unpack` has to give back the tensor that `pack` was given, each time that it is called"
    try:
        loss.backward(retain_graph=True)
        loss.backward()
    except Exception as error:
        said = str(error).splitlines()[0]
        raise AnswerError(f"backward after it raises {type(error).__name__}: {said}\nlikely slip: {slip}") from None
    got = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    (2 * forward()).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    expect(f"{what}: gradients of two backward passes after it", got, wanted, slip=slip)
