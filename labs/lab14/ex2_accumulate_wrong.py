"""Wrong answers to exercise 14.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("14.2", "it held the gradients of an earlier batch").diff("""
Resets the gradients first.
- losses = []
+ losses = []
+ if isinstance(forward, torch.nn.Module):
+     forward.zero_grad()
""")
wrong("14.2", "samples are the first dimension").diff("""
Takes every element of x for a sample.
- for rows, wanted in zip(x.tensor_split(micros), target.tensor_split(micros), strict=True):
+ for rows, wanted in zip(x.flatten().tensor_split(micros), target.tensor_split(micros), strict=True):
""")
wrong("14.2", "the model is the caller's").diff("""
Leaves training mode.
- losses = []
+ losses = []
+ if isinstance(forward, torch.nn.Module):
+     forward.eval()
""")
wrong("14.2", "7 samples in 3 micro-batches: expected a tensor").diff("""
Divides elements by samples.
- loss = loss_fn(forward(rows), wanted) * (len(rows) / len(x))
+ loss = loss_fn(forward(rows), wanted) * (rows.numel() / len(x))
""")
wrong("14.2", "autograd is disabled afterwards").diff("""
Disables autograd for all that follows.
- return torch.stack(losses).sum()
+ torch.set_grad_enabled(False)
+ return torch.stack(losses).sum()
""")
wrong("14.2", "m times too much, unless it is scaled").diff("""
Scales nothing.
- loss = loss_fn(forward(rows), wanted) * (len(rows) / len(x))
+ loss = loss_fn(forward(rows), wanted)
""")
wrong("14.2", "a micro-batch counts by its number of samples").diff("""
Takes the mean of the micro-batches.
- loss = loss_fn(forward(rows), wanted) * (len(rows) / len(x))
+ loss = loss_fn(forward(rows), wanted) / micros
""")
wrong("14.2", "all forward passes come first").diff("""
Goes backward once, at the end.
-     loss.backward()
-     losses.append(loss.detach())
- return torch.stack(losses).sum()
+     losses.append(loss)
+ total = torch.stack(losses).sum()
+ total.backward()
+ return total.detach()
""")
wrong("14.2", "`chunk` makes different ones").diff("""
Cuts with `chunk`.
- for rows, wanted in zip(x.tensor_split(micros), target.tensor_split(micros), strict=True):
+ for rows, wanted in zip(x.chunk(micros), target.chunk(micros), strict=True):
""")
wrong("14.2", "return a detached loss").diff("""
Returns the loss with its graph.
-     losses.append(loss.detach())
+     losses.append(loss)
""")
wrong("14.2", "this is the last micro-batch's share of the loss").diff("""
Returns the last loss.
- return torch.stack(losses).sum()
+ return losses[-1]
""")
wrong("14.2", "this is the sum of the micro-batches' losses").diff("""
Adds up losses that are not scaled.
- loss = loss_fn(forward(rows), wanted) * (len(rows) / len(x))
- loss.backward()
+ loss = loss_fn(forward(rows), wanted)
+ (loss * (len(rows) / len(x))).backward()
""")
wrong("14.2", "no backward pass ran").diff("""
Forgets to go backward.
-     loss.backward()
""")
wrong("14.2", "without `retain_graph`").diff("""
Keeps the graphs.
-     loss.backward()
-     losses.append(loss.detach())
- return torch.stack(losses).sum()
+     loss.backward(retain_graph=True)
+     losses.append(loss)
+ return torch.stack(losses).sum().detach()
""")
wrong("14.2", "their outputs are kept").diff("""
Computes the loss from all outputs.
-     loss = loss_fn(forward(rows), wanted) * (len(rows) / len(x))
-     loss.backward()
-     losses.append(loss.detach())
- return torch.stack(losses).sum()
+     output = forward(rows)
+     losses.append(output.detach())
+     (loss_fn(output, wanted) * (len(rows) / len(x))).backward()
+ return loss_fn(torch.cat(losses), target)
""")
wrong("14.2", "begin with the first").diff("""
Begins with the last micro-batch.
- for rows, wanted in zip(x.tensor_split(micros), target.tensor_split(micros), strict=True):
+ for rows, wanted in reversed(list(zip(x.tensor_split(micros), target.tensor_split(micros), strict=True))):
""")
wrong("14.2", "of samples that follow each other").diff("""
Takes every m-th sample.
- for rows, wanted in zip(x.tensor_split(micros), target.tensor_split(micros), strict=True):
+ for rows, wanted in [(x[at::micros], target[at::micros]) for at in range(micros)]:
""")
wrong("14.2", "the larger ones come first").diff("""
Leaves the rest to the last micro-batch.
- losses = []
+ losses, size = [], len(x) // micros
+ sizes = [size] * (micros - 1) + [len(x) - size * (micros - 1)]
- for rows, wanted in zip(x.tensor_split(micros), target.tensor_split(micros), strict=True):
+ for rows, wanted in zip(x.split(sizes), target.split(sizes), strict=True):
""")
wrong("14.2", "activations of two are alive").diff("""
Goes backward one micro-batch late.
- losses = []
+ losses, before = [], None
-     loss.backward()
-     losses.append(loss.detach())
+     if before is not None:
+         before.backward()
+     before = loss
+     losses.append(loss.detach())
- return torch.stack(losses).sum()
+ before.backward()
+ return torch.stack(losses).sum()
""")
wrong("14.2", "forward pass of the entire batch").diff("""
Computes the loss of the entire batch once more.
- return torch.stack(losses).sum()
+ with torch.no_grad():
+     return loss_fn(forward(x), target)
""")
wrong("14.2", "x is the caller's").diff("""
Changes x.
- return torch.stack(losses).sum()
+ x.zero_()
+ return torch.stack(losses).sum()
""")
