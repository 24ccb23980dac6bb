"""Wrong answers to exercise 9.7, each with words that its rejection must contain.

Most are bugs of published trainers.
"""

from minifsdp.course.workshop.wrong import wrong

wrong("9.7", "gives every rank the same weight").diff("""
Divides by this rank's number of targets (vllm-project/speculators#942, PrimeIntellect-ai/prime-rl#2562).
- comm.all_reduce(targets, group).wait()
- weight = group.size() / targets.clamp(min=1)
+ weight = 1 / targets.clamp(min=1)
""")


@wrong("9.7", "each micro-batch is divided by its own number of targets")
def accumulate_tokens(model, micro_batches, group):
    """Averages micro-batches, and then their means (PrimeIntellect-ai/prime-rl#1957, modelscope/ms-swift#10165)."""
    for number, (tokens, targets) in enumerate(micro_batches, start=1):
        mean = model(tokens, targets).sum() / (targets != IGNORED).sum() / len(micro_batches)
        if number == len(micro_batches):
            mean.backward()
        else:
            with model.no_sync():
                mean.backward()


wrong("9.7", "these are k means").diff("""
Takes the mean of each micro-batch, and adds them up (huggingface/transformers#37766).
- targets = torch.stack([(each != IGNORED).sum() for _, each in micro_batches]).sum()
- comm.all_reduce(targets, group).wait()
- weight = group.size() / targets.clamp(min=1)

- (weight * model(*micro_batch).sum()).backward()
+ (model(*micro_batch).sum() / (micro_batch[1] != IGNORED).sum().clamp(min=1)).backward()
""")
wrong("9.7", "the share of its samples").diff("""
Weighs the means of micro-batches by their numbers of samples (verl-project/verl#5625).
- targets = torch.stack([(each != IGNORED).sum() for _, each in micro_batches]).sum()
- comm.all_reduce(targets, group).wait()
- weight = group.size() / targets.clamp(min=1)
+ samples = sum(len(each) for each, _ in micro_batches)

- (weight * model(*micro_batch).sum()).backward()
+ share = len(micro_batch[0]) / samples
+ (share * model(*micro_batch).sum() / (micro_batch[1] != IGNORED).sum().clamp(min=1)).backward()
""")
wrong("9.7", "divides by N once more").diff("""
Forgets that FSDP averages (verl-project/verl-SpeCo#29).
- weight = group.size() / targets.clamp(min=1)
+ weight = 1 / targets.clamp(min=1)
""")
wrong("9.7", "N divides twice").diff("""
Averages over the ranks by hand, too.
- weight = group.size() / targets.clamp(min=1)
+ weight = 1 / targets.clamp(min=1) / group.size()
""")
wrong("9.7", "N is in it twice").diff("""
Averages the counts, and multiplies by N all the same.
- comm.all_reduce(targets, group).wait()
- weight = group.size() / targets.clamp(min=1)
+ targets = targets.double()
+ comm.all_reduce(targets, group, comm.MEAN).wait()
+ weight = group.size() / targets.clamp(min=1 / group.size())
""")
wrong("9.7", "these are sums, and FSDP divides them").diff("""
Counts the targets, and loses the count on the way (radixark/miles#3231).
- (weight * model(*micro_batch).sum()).backward()
+ model(*micro_batch).sum().backward()
""")
wrong("9.7", "these are sums, which N multiplies").diff("""
Undoes the average, and divides by nothing.
- (weight * model(*micro_batch).sum()).backward()
+ (group.size() * model(*micro_batch).sum()).backward()
""")
wrong("9.7", "tokens without a target are counted").diff("""
Counts padding.
- targets = torch.stack([(each != IGNORED).sum() for _, each in micro_batches]).sum()
+ targets = torch.tensor(sum(each.numel() for _, each in micro_batches))
""")


@wrong("9.7", "`mean` also divides by the tokens without a target")
def accumulate_tokens(model, micro_batches, group):
    """Goes on as in 9.5, with the mean of what the model returns."""
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if number == len(micro_batches) else model.no_sync():
            (model(*micro_batch).mean() / len(micro_batches)).backward()


wrong("9.7", "k divides as well").diff("""
Also divides by the number of micro-batches.
- (weight * model(*micro_batch).sum()).backward()
+ (weight * model(*micro_batch).sum() / len(micro_batches)).backward()
""")
wrong("9.7", "k multiplies").diff("""
Also multiplies by the number of micro-batches.
- (weight * model(*micro_batch).sum()).backward()
+ (weight * model(*micro_batch).sum() * len(micro_batches)).backward()
""")


@wrong("9.7", "targets of the same micro-batch on all ranks")
def accumulate_tokens(model, micro_batches, group):
    """Corrects for the ranks and not for the micro-batches, a message for each (PrimeIntellect-ai/prime-rl#1960)."""
    for number, micro_batch in enumerate(micro_batches, start=1):
        targets = (micro_batch[1] != IGNORED).sum()
        comm.all_reduce(targets, group).wait()
        weight = group.size() / targets.clamp(min=1) / len(micro_batches)
        with nullcontext() if number == len(micro_batches) else model.no_sync():
            (weight * model(*micro_batch).sum()).backward()


wrong("9.7", "counts as one with a target").diff("""
Protects each count against 0 instead of their sum (radixark/miles#2796).
- targets = torch.stack([(each != IGNORED).sum() for _, each in micro_batches]).sum()
+ targets = torch.stack([(each != IGNORED).sum().clamp(min=1) for _, each in micro_batches]).sum()
""")
wrong("9.7", "the count or the weight was rounded").diff("""
Counts in the dtype of mixed precision.
- comm.all_reduce(targets, group).wait()
+ targets = targets.to(torch.bfloat16)
+ comm.all_reduce(targets, group).wait()
+ targets = targets.to(torch.int64)
""")
wrong("9.7", "the mean over no targets is 0 / 0").diff("""
Weighs means by their numbers of targets, but a mean over none is not a number (allenai/OLMo-core#657).
- (weight * model(*micro_batch).sum()).backward()
+ count = (micro_batch[1] != IGNORED).sum()
+ mean = model(*micro_batch).sum() / count
+ (weight * count * mean).backward()
""")
wrong("9.7", "N / 0 is infinite").diff("""
Expects a target somewhere (NVIDIA-NeMo/Automodel#3797).
- weight = group.size() / targets.clamp(min=1)
+ weight = group.size() / targets
""")
wrong("9.7", "the others wait for it").diff("""
Skips micro-batches without targets (lightseekorg/TorchSpec#126, NVIDIA-NeMo/Automodel#2468).
- with nullcontext() if number == len(micro_batches) else model.no_sync():
+ if (micro_batch[1] == IGNORED).all():
+     continue
+ with nullcontext() if number == len(micro_batches) else model.no_sync():
""")


@wrong("9.7", "of all micro-batches are alive together")
def accumulate_tokens(model, micro_batches, group):
    """Adds up the losses first, and knows the count then (meta-pytorch/torchtune#1875, undone by #1917)."""
    loss = targets = 0
    for micro_batch in micro_batches:
        loss = loss + model(*micro_batch).sum()
        targets = targets + (micro_batch[1] != IGNORED).sum()
    comm.all_reduce(targets, group).wait()
    (loss * group.size() / targets.clamp(min=1)).backward()


@wrong("9.7", "one forward for each")
def accumulate_tokens(model, micro_batches, group):
    """Makes one batch of them again."""
    tokens, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    count = (targets != IGNORED).sum()
    comm.all_reduce(count, group).wait()
    (group.size() / count.clamp(min=1) * model(tokens, targets).sum()).backward()


@wrong("9.7", "give the losses their weight, not the gradients")
def accumulate_tokens(model, micro_batches, group):
    """Divides the gradients at the end, and with them what was there."""
    targets = torch.stack([(each != IGNORED).sum() for _, each in micro_batches]).sum()
    comm.all_reduce(targets, group).wait()
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if number == len(micro_batches) else model.no_sync():
            model(*micro_batch).sum().backward()
    for p in model.parameters():
        p.grad *= group.size() / targets.clamp(min=1)


wrong("9.7", "the caller decides when gradients begin anew").diff("""
Zeroes the gradients first.
- comm.all_reduce(targets, group).wait()
+ model.zero_grad()
+ comm.all_reduce(targets, group).wait()
""")
wrong("9.7", "nothing is ever reduced").diff("""
Runs the last micro-batch inside no_sync, too.
- with nullcontext() if number == len(micro_batches) else model.no_sync():
+ with model.no_sync():
""")
wrong("9.7", "run all but the last inside `no_sync`").diff("""
Reduces the gradient of each micro-batch.
- with nullcontext() if number == len(micro_batches) else model.no_sync():
-     (weight * model(*micro_batch).sum()).backward()
+ (weight * model(*micro_batch).sum()).backward()
""")
wrong("9.7", "and send one number").diff("""
Counts each micro-batch in a message of its own.
- targets = torch.stack([(each != IGNORED).sum() for _, each in micro_batches]).sum()
- comm.all_reduce(targets, group).wait()
+ targets = 0
+ for _, each in micro_batches:
+     count = (each != IGNORED).sum()
+     comm.all_reduce(count, group).wait()
+     targets = targets + count
""")
wrong("9.7", "`comm.all_reduce` only starts").diff("""
Does not wait for the count.
- comm.all_reduce(targets, group).wait()
+ comm.all_reduce(targets, group)
""")
wrong("9.7", "is about the world").diff("""
Takes the number of all ranks of the job.
- weight = group.size() / targets.clamp(min=1)
+ weight = comm.world().size() / targets.clamp(min=1)
""")
