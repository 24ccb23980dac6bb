"""Wrong answers to exercise 3.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("3.5", "the memory is not saved").diff("""
Keeps the full gradients alive until after the step.
- for q in params:
-     q.grad = None
""")


@wrong("3.5", "a reduction is started for every gradient")
def reduce_in_backward(params, shard, start, in_flight, group):
    """Reduces whenever a gradient comes."""

    def on_gradient(p):
        while in_flight:
            in_flight.pop()()
        in_flight.append(start(params, shard, group))
        p.grad = None

    return [p.register_post_accumulate_grad_hook(on_gradient) for p in params]


wrong("3.5", "backward stands still while it travels").diff("""
Waits for each reduction in the hook that started it.
- while in_flight:
-     in_flight.pop()()
- in_flight.append(start(params, shard, group))
+ start(params, shard, group)()
""")
wrong("3.5", "all buckets are in flight").diff("""
Never finishes a reduction during backward.
- while in_flight:
-     in_flight.pop()()
""")
wrong("3.5", "must start anew").diff("""
Counts the gradients of the first backward only.
- missing = set(params)
+ arrived = []
- missing.remove(p)
- if missing:
+ arrived.append(p)
+ if len(arrived) != len(params):
- missing.update(params)
""")
wrong("3.5", "not yet, or not any more").diff("""
Clears the gradients before the reduction copies them.
- in_flight.append(start(params, shard, group))

      q.grad = None
+ in_flight.append(start(params, shard, group))
""")
wrong("3.5", "whichever that is").diff("""
Takes the gradient of the last parameter in the list for the last to come.
- missing = set(params)

- missing.remove(p)
- if missing:
-     return
- missing.update(params)

- return [p.register_post_accumulate_grad_hook(on_gradient) for p in params]
+ handles = [p.register_post_accumulate_grad_hook(lambda p: None) for p in params[:-1]]
+ return [*handles, params[-1].register_post_accumulate_grad_hook(on_gradient)]
""")
wrong("3.5", "runs before the gradient is in p.grad").diff("""
Uses the tensor hook, which runs before the gradient is accumulated.
- return [p.register_post_accumulate_grad_hook(on_gradient) for p in params]
+ return [p.register_hook(lambda grad, p=p: on_gradient(p)) for p in params]
""")
wrong("3.5", "the count was not taken back").diff("""
Counts on where the first backward ended.
- missing = set(params)
+ count = 0
- missing.remove(p)
- if missing:
+ nonlocal count
+ count += 1
+ if count < len(params):
- missing.update(params)
""")
wrong("3.5", "take it out of in_flight").diff("""
Finishes what is in flight, and leaves it there.
- while in_flight:
-     in_flight.pop()()
+ for finish in in_flight:
+     finish()
""")
wrong("3.5", "by setting it to None").diff("""
Frees the gradients as if they were buffers.
  for q in params:
+     device.free(q.grad)
""")
wrong("3.5", "otherwise two buckets are held").diff("""
Starts a reduction before it finishes the one before.
  missing.update(params)
+ finish = start(params, shard, group)
- in_flight.append(start(params, shard, group))
+ in_flight.append(finish)
""")
wrong("3.5", "expected `group`, got the world").diff("""
Starts reductions in the world.
- def on_gradient(p):
+ def hook(p):
- in_flight.append(start(params, shard, group))
+ in_flight.append(start(params, shard, comm.world()))
- return [p.register_post_accumulate_grad_hook(on_gradient) for p in params]
+ return [p.register_post_accumulate_grad_hook(hook) for p in params]
""")
