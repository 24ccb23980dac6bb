"""Wrong answers to exercise 15.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("15.4", "divide each loss by m").diff("""
Scales nothing.
-         y = loss / len(inputs)
+         y = loss
""")
wrong("15.4", "return the micro-batches' losses").diff("""
Returns the shares of the batch's loss.
-         losses.append(loss.detach())
-         y = loss / len(inputs)
+         y = loss / len(inputs)
+         losses.append(y.detach())
""")
wrong("15.4", "return detached losses").diff("""
Returns losses with their graphs.
-         losses.append(loss.detach())
+         losses.append(loss)
""")
wrong("15.4", "gradients add up over the micro-batches, and are reduced once").diff("""
Reduces after every micro-batch.
-     if rank > 0:
-         comm.send(x.grad, rank - 1, pp).wait()
- reduce()
+     if rank > 0:
+         comm.send(x.grad, rank - 1, pp).wait()
+     reduce()
""")
wrong("15.4", "`reduce` is never called").diff("""
Never reduces.
- reduce()
""")
wrong("15.4", "call it after the last backward pass").diff("""
Reduces before the backward passes.
- for x, y in kept:
+ reduce()
+ for x, y in kept:
- reduce()
""")
wrong("15.4", "only the first stage takes `inputs`").diff("""
Gives every stage the tokens.
-     y = stage(x)
+     y = stage(tokens)
""")
wrong("15.4", "keep the inputs and outputs of all").diff("""
Keeps the last micro-batch only.
-     kept.append((x, y))
+     kept = [(x.detach().requires_grad_() if rank > 0 else x, y * 0) for x, y in kept] + [(x, y)]
+     for old, _ in kept[:-1]:
+         if rank > 0:
+             old.grad = torch.zeros_like(old)
""")


@wrong("15.4", "leaves the other stages idle")
def step(stage, inputs, loss_of, buffer, pp, reduce):
    """Takes one micro-batch after another."""
    rank, last = pp.rank(), pp.size() - 1
    losses = []
    for i, tokens in enumerate(inputs):
        x = tokens
        if rank > 0:
            x = buffer()
            comm.recv(x, rank - 1, pp).wait()
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            comm.send(y.detach(), rank + 1, pp).wait()
            gradient = buffer()
            comm.recv(gradient, rank + 1, pp).wait()
            y.backward(gradient)
        else:
            loss = loss_of(y, i)
            losses.append(loss.detach())
            (loss / len(inputs)).backward()
        if rank > 0:
            comm.send(x.grad, rank - 1, pp).wait()
    reduce()
    return losses


wrong("15.4", "does not require grad").diff("""
Detaches the output before its backward pass.
-         comm.send(y.detach(), rank + 1, pp).wait()
+         y = y.detach()
+         comm.send(y, rank + 1, pp).wait()
""")
wrong("15.4", "the last stage has a loss for each micro-batch").diff("""
Returns no losses.
- return losses
+ return []
""")
wrong("15.4", "call `requires_grad_()` on an input").diff("""
Asks for no gradient of what has arrived.
-         x.requires_grad_()
""")
wrong("15.4", "its backward pass needs the input that the next one would overwrite").diff("""
Receives all micro-batches into one buffer.
- kept, losses = [], []
+ kept, losses, one = [], [], buffer()
-         x = buffer()
-         comm.recv(x, rank - 1, pp).wait()
+         x = one.detach()
+         comm.recv(x, rank - 1, pp).wait()
""")
wrong("15.4", "stages are no samples").diff("""
Divides the loss by the number of stages, too.
-         y = loss / len(inputs)
+         y = loss / len(inputs) / pp.size()
""")
wrong("15.4", "`backward` begins at the loss").diff("""
Begins the backward pass at the output.
-         y = loss / len(inputs)
+         y = y.sum()
""")
