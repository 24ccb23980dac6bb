"""Wrong answers to exercise 9.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("9.3", "nothing is divided before the sum")
def divisors(dtype, ranks):
    """Divides the sum, whatever the dtype."""
    return 1, ranks


@wrong("9.3", "what is below 3e-8 * N is 0 then")
def divisors(dtype, ranks):
    """Divides everything first."""
    return (ranks, 1) if dtype is torch.float16 else (1, ranks)


@wrong("9.3", "not a power of two")
def divisors(dtype, ranks):
    """Divides by the root itself."""
    return (ranks**0.5, ranks**0.5) if dtype is torch.float16 else (1, ranks)


wrong("9.3", "and the mean needs").diff("""
Divides by the power of two twice.
- while dtype is torch.float16 and before * before < ranks:
+ while before * before < ranks:
- return before, ranks / before
+ return (before, before) if dtype is torch.float16 else (1, ranks)
""")
wrong("9.3", "has fp32's range").diff("""
Takes every dtype of two bytes for fp16.
- while dtype is torch.float16 and before * before < ranks:
+ while dtype.itemsize == 2 and before * before < ranks:
""")
wrong("9.3", "fp32 has range enough").diff("""
Splits in fp32 as well, but not in bf16.
- while dtype is torch.float16 and before * before < ranks:
+ while dtype is not torch.bfloat16 and before * before < ranks:
""")
wrong("9.3", "rounded down").diff("""
The power of two below the root: nothing at all on 3 ranks would be that.
- before = 1
- while dtype is torch.float16 and before * before < ranks:
+ if dtype is not torch.float16:
+     return 1, ranks
+ before = 1 if ranks == 1 else 2
+ while 4 * before * before <= ranks:
""")
wrong("9.3", "does not ask whether N can be divided").diff("""
torch's loop.
  def divisors(dtype, ranks):
+     if dtype is not torch.float16:
+         return 1, ranks
- while dtype is torch.float16 and before * before < ranks:
+ while ranks % before == 0 and ranks / before > before:
""")
wrong("9.3", "comes first, the rest after the sum").diff("""
The power of two above the root, also where the root is one.
- while dtype is torch.float16 and before * before < ranks:
+ while dtype is torch.float16 and before * before <= ranks:
""")
wrong("9.3", "of all dtypes fp16 alone").diff("""
Splits in every dtype that it does not know.
- while dtype is torch.float16 and before * before < ranks:
+ while dtype not in (torch.bfloat16, torch.float32) and before * before < ranks:
""")
wrong("9.3", "on 100000 ranks").diff("""
Divides by 32 at most, enough for 1,024 ranks.
- while dtype is torch.float16 and before * before < ranks:
+ while dtype is torch.float16 and before * before < ranks and before < 32:
""")
