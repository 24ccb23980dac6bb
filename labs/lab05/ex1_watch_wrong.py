"""Wrong answers to exercise 5.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("5.1", "is not in .grad yet").diff("""
Hooks the gradient on its way to the parameter, before it is accumulated.
- queued = False
- def end():
-     nonlocal queued
-     queued = False
-     record("end of backward")
+ done = []
  def on_output(gradient):
-     nonlocal queued

- if not queued:
-     queued = True
-     Variable._execution_engine.queue_callback(end)
+ if not done:
+     done.append(True)
+     Variable._execution_engine.queue_callback(lambda: (done.clear(), record("end of backward")))
- p.register_post_accumulate_grad_hook(lambda p, name=name: record(f"gradient of {name}"))
+ p.register_hook(lambda gradient, name=name: record(f"gradient of {name}"))
""")
wrong("5.1", "a lambda made in a loop sees the loop's last one").diff("""
Every hook speaks of the last parameter.
- queued = False
- def end():
-     nonlocal queued
-     queued = False
-     record("end of backward")
+ done = []
  def on_output(gradient):
-     nonlocal queued

- if not queued:
-     queued = True
-     Variable._execution_engine.queue_callback(end)
+ if not done:
+     done.append(True)
+     Variable._execution_engine.queue_callback(lambda: (done.clear(), record("end of backward")))
- p.register_post_accumulate_grad_hook(lambda p, name=name: record(f"gradient of {name}"))
+ p.register_post_accumulate_grad_hook(lambda p: record(f"gradient of {name}"))
""")
wrong("5.1", "queue it once per backward").diff("""
Queues the callback for every output.
- queued = False
- def end():
-     nonlocal queued
-     queued = False
-     record("end of backward")

  def on_output(gradient):
-     nonlocal queued

- if not queued:
-     queued = True
-     Variable._execution_engine.queue_callback(end)
+ Variable._execution_engine.queue_callback(lambda: record("end of backward"))
""")


@wrong("5.1", "says nothing of its parameters")
def watch(module, record):
    """Takes the module's backward hooks for its parameters' gradients."""

    def end():
        record("end of backward")

    def post_backward(module, grad_input, grad_output):
        record("gradients of all parameters")

    def pre_backward(module, grad_output):
        record("output gradient")
        Variable._execution_engine.queue_callback(end)

    module.register_forward_pre_hook(lambda module, args: record("pre-forward"))
    module.register_forward_hook(lambda module, args, output: record("post-forward"))
    module.register_full_backward_pre_hook(pre_backward)
    module.register_full_backward_hook(post_backward)


@wrong("5.1", "is not the end of backward")
def watch(module, record):
    """Takes the module's last gradient for the end of backward."""
    left = []

    def on_gradient(name):
        record(f"gradient of {name}")
        left.remove(name)
        if not left:
            record("end of backward")

    def post_forward(module, args, output):
        record("post-forward")
        if output.requires_grad:
            left[:] = [name for name, _ in module.named_parameters()]
            output.register_hook(lambda gradient: record("output gradient"))

    module.register_forward_pre_hook(lambda module, args: record("pre-forward"))
    module.register_forward_hook(post_forward)
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: on_gradient(name))


wrong("5.1", "the flag that prevents a second callback").diff("""
Queues the callback in the first backward only.
- queued = False
- def end():
-     nonlocal queued
-     queued = False
-     record("end of backward")
+ done = []
  def on_output(gradient):
-     nonlocal queued

- if not queued:
-     queued = True
-     Variable._execution_engine.queue_callback(end)
+ if not done:
+     done.append(True)
+     Variable._execution_engine.queue_callback(lambda: record("end of backward"))
""")
wrong("5.1", "each watched module has a state of its own").diff("""
Keeps its flag in a default argument, which all modules share.
- def watch(module, record):
-     queued = False
+ def watch(module, record, queued=[]):
- nonlocal queued
- queued = False
+ queued.clear()
  def on_output(gradient):
-     nonlocal queued

- queued = True
+ queued.append(True)
""")
wrong("5.1", "says nothing of a backward").diff("""
Takes training mode for a backward that follows.
  def watch(module, record):
-     queued = False
+     queued = []
- nonlocal queued
- queued = False
+ queued.clear()
  def on_output(gradient):
-     nonlocal queued

- queued = True
+ queued.append(True)
- if output.requires_grad:
+ if module.training and output.requires_grad:
""")


@wrong("5.1", "queue it at the first of its outputs' gradients")
def watch(module, record):
    """Counts outputs: the end is queued when the first call's output has its gradient."""
    calls = [0]

    def pre(module, args):
        record("pre-forward")

    def post_forward(module, args, output):
        record("post-forward")
        if output.requires_grad:
            number = calls[0]
            calls[0] += 1

            def on_output(gradient):
                record("output gradient")
                if number == 0:
                    calls[0] = 0
                    Variable._execution_engine.queue_callback(lambda: record("end of backward"))

            output.register_hook(on_output)

    module.register_forward_pre_hook(pre)
    module.register_forward_hook(post_forward)
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: record(f"gradient of {name}"))


wrong("5.1", "expected `end of backward`, got nothing more").diff("""
Resets its flag when a forward begins, not when backward ends: a forward called twice resets it in vain.
- queued = False
- def end():
-     nonlocal queued
-     queued = False
-     record("end of backward")
+ state = {"queued": False}
+ def pre(module, args):
+     state["queued"] = False
+     record("pre-forward")
  def on_output(gradient):
-     nonlocal queued

- if not queued:
-     queued = True
-     Variable._execution_engine.queue_callback(end)
+ if not state["queued"]:
+     state["queued"] = True
+     Variable._execution_engine.queue_callback(lambda: record("end of backward"))
- module.register_forward_pre_hook(lambda module, args: record("pre-forward"))
+ module.register_forward_pre_hook(pre)
""")


@wrong("5.1", "an output without a gradient cannot be hooked")
def watch(module, record):
    """Hooks outputs wherever gradients are enabled."""
    queued = [False]

    def over():
        queued[0] = False
        record("end of backward")

    def began(gradient):
        record("output gradient")
        if not queued[0]:
            queued[0] = True
            Variable._execution_engine.queue_callback(over)

    def post(module, args, output):
        record("post-forward")
        if torch.is_grad_enabled():
            output.register_hook(began)

    module.register_forward_pre_hook(lambda module, args: record("pre-forward"))
    module.register_forward_hook(post)
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: record(f"gradient of {name}"))


wrong("5.1", "the output has no hook").diff("""
Makes the output's hook and registers it nowhere: neither its gradient nor the end is recorded.
- if output.requires_grad:
-     output.register_hook(on_output)
""")
wrong("5.1", "under torch.no_grad(), after `post-forward`").diff("""
Hooks every output, so that a forward under torch.no_grad() raises.
- if output.requires_grad:
-     output.register_hook(on_output)
+ output.register_hook(on_output)
""")
