"""Wrong answers to exercise 0.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("0.2", "the stages build on each other")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """Each stage shards its own term only."""
    p, g, s = itemsize * psi, itemsize * psi, k * psi
    return {
        "replicated": p + g + s,
        "stage 1": p + g + s / ranks,
        "stage 2": p + g / ranks + s,
        "stage 3": p / ranks + g + s,
    }


@wrong("0.2", "the parameters last")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """Shards the parameters first."""
    p, g, s = itemsize * psi, itemsize * psi, k * psi
    return {
        "replicated": p + g + s,
        "stage 1": p / ranks + g + s,
        "stage 2": (p + g) / ranks + s,
        "stage 3": (p + g + s) / ranks,
    }


@wrong("0.2", "divide by N")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """Shares the state among the other ranks."""
    p, g, s, others = itemsize * psi, itemsize * psi, k * psi, max(1, ranks - 1)
    return {
        "replicated": p + g + s,
        "stage 1": p + g + s / others,
        "stage 2": p + (g + s) / others,
        "stage 3": (p + g + s) / others,
    }


@wrong("0.2", "K is an argument")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """The paper's K = 12, for every optimizer."""
    p, g, s = itemsize * psi, itemsize * psi, 12 * psi
    return {
        "replicated": p + g + s,
        "stage 1": p + g + s / ranks,
        "stage 2": p + (g + s) / ranks,
        "stage 3": (p + g + s) / ranks,
    }


@wrong("0.2", "not GiB")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """Returns GiB."""
    p, g, s = itemsize * psi / 2**30, itemsize * psi / 2**30, k * psi / 2**30
    return {
        "replicated": p + g + s,
        "stage 1": p + g + s / ranks,
        "stage 2": p + (g + s) / ranks,
        "stage 3": (p + g + s) / ranks,
    }


@wrong("0.2", "k and itemsize are arguments")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """The formulas of the paper with its numbers in them."""
    return {
        "replicated": 16 * psi,
        "stage 1": 4 * psi + 12 * psi / ranks,
        "stage 2": 2 * psi + 14 * psi / ranks,
        "stage 3": 16 * psi / ranks,
    }


@wrong("0.2", "K includes the float32 copy")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """Counts the float32 copy a second time."""
    p, g, s = itemsize * psi, itemsize * psi, (k + 4) * psi
    return {
        "replicated": p + g + s,
        "stage 1": p + g + s / ranks,
        "stage 2": p + (g + s) / ranks,
        "stage 3": (p + g + s) / ranks,
    }


@wrong("0.2", "without rounding")
def zero_stages(psi, ranks, k=12, itemsize=2):
    """Divides bytes as whole numbers."""
    p, g, s = itemsize * psi, itemsize * psi, k * psi
    return {
        "replicated": p + g + s,
        "stage 1": p + g + s // ranks,
        "stage 2": p + (g + s) // ranks,
        "stage 3": (p + g + s) // ranks,
    }


@wrong("0.2", "replicated, Ψ = 50, N = 64, K = 12")
def zero_stages(psi, ranks, k=16, itemsize=2):
    """Has another default for K."""
    one, state = itemsize * psi, k * psi
    return {
        "replicated": 2 * one + state,
        "stage 1": 2 * one + state / ranks,
        "stage 2": one + (one + state) / ranks,
        "stage 3": (2 * one + state) / ranks,
    }


wrong("0.2", "in this order").diff("""
Returns stage 3 first.
- return {
+ return {
+     "stage 3": (parameters + gradients + optimizer) / ranks,

- "stage 3": (parameters + gradients + optimizer) / ranks,
""")
wrong("0.2", "K = 0, 1 bytes per element: bytes").diff("""
Takes K = 0, that of SGD, for an argument that was not given.
- optimizer = k * psi
+ optimizer = (k or 12) * psi
""")
wrong("0.2", "do not round").diff("""
Rounds to one decimal, as the paper's table.
- "stage 1": parameters + gradients + optimizer / ranks,
+ "stage 1": round(parameters + gradients + optimizer / ranks, 1),
""")
wrong("0.2", "N = 1, K = 8, 4 bytes per element: bytes").diff("""
Has no stages where there is one rank, and loses the state.
- "stage 1": parameters + gradients + optimizer / ranks,
+ "stage 1": parameters + gradients + (optimizer / ranks if ranks > 1 else 0),
""")
