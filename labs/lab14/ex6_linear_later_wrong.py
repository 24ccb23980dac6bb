"""Wrong answers to exercise 14.6, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("14.6", "nothing was postponed: the gradients of the weights are computed in the backward pass").diff("""
Puts nothing off.
-         later.append(finish)
+         finish()
""")
wrong("14.6", "the gradient of x is postponed, too").diff("""
Leaves the gradient of x for later as well.
-         later.append(finish)
-         return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
+         later.append(finish)
+         return torch.zeros_like(x), None, None
""")
wrong("14.6", "only the addition is left for later").diff("""
Computes the product in backward.
-             add(weight, rows.T @ x_rows)
-             add(bias, rows.sum(0))
-         later.append(finish)
+             add(weight, product)
+             add(bias, rows.sum(0))
+         product = rows.T @ x_rows
+         later.append(finish)
""")
wrong("14.6", "was replaced: gradients of micro-batches add up").diff("""
Replaces the gradient.
-     parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
+     parameter.grad = gradient
""")
wrong("14.6", "keeps x's graph alive").diff("""
Lets autograd record the product.
-         rows, x_rows = gradient.flatten(0, -2), x.detach().flatten(0, -2)
+         rows, x_rows = gradient.flatten(0, -2), x.flatten(0, -2)
""")
wrong("14.6", "so that the result has the weight's shape").diff("""
Transposes x.
-             add(weight, rows.T @ x_rows)
+             add(weight, x_rows.T @ rows)
""")
wrong("14.6", "the first stage's x needs no gradient").diff("""
Computes a gradient of x even where none is needed.
-         return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
+         return gradient @ weight, None, None
""")
wrong("14.6", "the bias is added to every row").diff("""
Takes the mean over the rows for the bias.
-             add(bias, rows.sum(0))
+             add(bias, rows.mean(0))
""")
wrong("14.6", "the bias's is not: backward returns None for both").diff("""
Returns the bias's gradient at once.
-             add(bias, rows.sum(0))
-         later.append(finish)
-         return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
+         later.append(finish)
+         return gradient @ weight if ctx.needs_input_grad[0] else None, None, rows.sum(0)
""")
wrong("14.6", "each backward appends one").diff("""
Forgets what was to be done later.
-         later.append(finish)
""")
wrong("14.6", "one function for both gradients").diff("""
Appends a function for each parameter.
-             def finish():
-                 add(weight, rows.T @ x_rows)
-                 add(bias, rows.sum(0))
-             later.append(finish)
+             later.append(lambda: add(weight, rows.T @ x_rows))
+             later.append(lambda: add(bias, rows.sum(0)))
""")
wrong("14.6", "x has two dimensions or more").diff("""
Takes x to have three dimensions.
-             add(weight, rows.T @ x_rows)
-             add(bias, rows.sum(0))
+             add(weight, torch.einsum("bso,bsi->oi", gradient, x.detach()))
+             add(bias, gradient.sum((0, 1)))
""")
wrong("14.6", "the gradient of the bias is computed in the backward pass").diff("""
Adds up the rows for the bias in backward.
-             add(bias, rows.sum(0))
+             add(bias, total)
-         later.append(finish)
+         total = rows.sum(0)
+         later.append(finish)
""")
wrong("14.6", "append the function, not what it returns").diff("""
Calls the function that it should append.
-         later.append(finish)
+         later.append(finish())
""")
wrong("14.6", "the function computes the bias's gradient, too").diff("""
Forgets the bias.
-             add(bias, rows.sum(0))
""")
wrong("14.6", "it is added twice").diff("""
Adds the weight's gradient twice.
-             add(weight, rows.T @ x_rows)
+             product = rows.T @ x_rows
+             add(weight, product)
+             add(weight, product)
""")
wrong("14.6", "backward returns it first").diff("""
Leaves the gradient of x out.
-         return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
+         return None, None, None
""")
wrong("14.6", "expected 3, got 1").diff("""
Keeps the newest function alone.
-         later.append(finish)
+         later[:] = [finish]
""")
wrong("14.6", "no second forward").diff("""
Computes the output again, and goes backward from there.
-             def finish():
-                 add(weight, rows.T @ x_rows)
-                 add(bias, rows.sum(0))
-             later.append(finish)
+             later.append(lambda: F.linear(x.detach(), weight, bias).backward(gradient))
""")
wrong("14.6", "x is that of another forward pass").diff("""
Keeps one x for all micro-batches.
- class Linear(torch.autograd.Function):
+ kept = {}
+ class Linear(torch.autograd.Function):
-             ctx.save_for_backward(x, weight, bias)
+             kept["x"] = x
+             ctx.save_for_backward(weight, bias)
-             x, weight, bias = ctx.saved_tensors
+             x, (weight, bias) = kept["x"], ctx.saved_tensors
""")
wrong("14.6", "not all the work in `later`").diff("""
Lets the first function do everything.
- class Linear(torch.autograd.Function):
+ waiting = []
+ class Linear(torch.autograd.Function):
-             def finish():
-                 add(weight, rows.T @ x_rows)
-                 add(bias, rows.sum(0))
+             waiting.append((rows, x_rows))
+             def finish():
+                 while waiting:
+                     rows, x_rows = waiting.pop()
+                     add(weight, rows.T @ x_rows)
+                     add(bias, rows.sum(0))
""")
wrong("14.6", "this is another micro-batch's").diff("""
Lets each function do the oldest work that is left.
- class Linear(torch.autograd.Function):
+ waiting = []
+ class Linear(torch.autograd.Function):
-             def finish():
-                 add(weight, rows.T @ x_rows)
-                 add(bias, rows.sum(0))
+             waiting.append((rows, x_rows))
+             def finish():
+                 rows, x_rows = waiting.pop(0)
+                 add(weight, rows.T @ x_rows)
+                 add(bias, rows.sum(0))
""")
wrong("14.6", "this is the newest micro-batch's").diff("""
Lets each function do the newest work that is left.
- class Linear(torch.autograd.Function):
+ waiting = []
+ class Linear(torch.autograd.Function):
-             def finish():
-                 add(weight, rows.T @ x_rows)
-                 add(bias, rows.sum(0))
+             waiting.append((rows, x_rows))
+             def finish():
+                 rows, x_rows = waiting.pop()
+                 add(weight, rows.T @ x_rows)
+                 add(bias, rows.sum(0))
""")
wrong("14.6", "each backward pass needs its own, from `ctx`").diff("""
Takes the inputs in the order of the forward passes.
- class Linear(torch.autograd.Function):
+ kept = []
+ class Linear(torch.autograd.Function):
-             ctx.save_for_backward(x, weight, bias)
+             kept.append(x)
+             ctx.save_for_backward(weight, bias)
-             x, weight, bias = ctx.saved_tensors
+             x, (weight, bias) = kept.pop(0), ctx.saved_tensors
""")
wrong("14.6", "the gradient of the weight is computed 2 times").diff("""
Multiplies twice where there is a gradient already.
-             add(weight, rows.T @ x_rows)
+             add(weight, rows.T @ x_rows if weight.grad is None else (rows.T @ x_rows + rows.T @ x_rows) / 2)
""")
wrong("14.6", "the output is computed 2 times").diff("""
Computes the output twice.
-             return F.linear(x, weight, bias)
+             F.linear(x, weight)
+             return F.linear(x, weight, bias)
""")
wrong("14.6", "the gradient of x is computed 2 times").diff("""
Computes the gradient of x twice.
-         return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
+         gradient @ weight
+         return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
""")
wrong("14.6", "for the parameters of its own call").diff("""
Keeps the parameters of the last call.
- class Linear(torch.autograd.Function):
+ held = []
+ class Linear(torch.autograd.Function):
-             ctx.save_for_backward(x, weight, bias)
+             held[:] = [weight, bias]
+             ctx.save_for_backward(x, weight, bias)
-             def finish():
-                 add(weight, rows.T @ x_rows)
-                 add(bias, rows.sum(0))
+             def finish():
+                 add(held[0], rows.T @ x_rows)
+                 add(held[1], rows.sum(0))
""")
wrong("14.6", "the gradient of y afterwards").diff("""
Clears the gradient of y.
-             def finish():
-                 add(weight, rows.T @ x_rows)
-                 add(bias, rows.sum(0))
+             def finish():
+                 add(weight, rows.T @ x_rows)
+                 add(bias, rows.sum(0))
+                 rows.zero_()
""")
wrong("14.6", "over all dimensions of the gradient of y except the last").diff("""
Adds up the first dimension for the bias.
-             add(bias, rows.sum(0))
+             add(bias, gradient.sum(0))
""")
wrong("14.6", "it needs its own memory").diff("""
Takes the gradient of y for the bias's if there is one row.
-             add(bias, rows.sum(0))
+             add(bias, rows.sum(0) if len(rows) > 1 else rows[0])
""")
wrong("14.6", "each keeps its own `later`").diff("""
Appends to the newest list.
- class Linear(torch.autograd.Function):
+ linear_later.newest = later
+ class Linear(torch.autograd.Function):
-         later.append(finish)
+         linear_later.newest.append(finish)
""")
wrong("14.6", "only the optimizer changes parameters").diff("""
Takes a step, too.
-             add(bias, rows.sum(0))
+             add(bias, rows.sum(0))
+             weight.data.sub_(0.1 * weight.grad)
""")
wrong("14.6", "`later` is the caller's").diff("""
Takes the functions out of the caller's list.
-             add(bias, rows.sum(0))
+             add(bias, rows.sum(0))
+             later[:] = later[1:]
""")
wrong("14.6", "it has not added to `.grad` of the weight").diff("""
Keeps a gradient that is there.
-             add(weight, rows.T @ x_rows)
+             product = rows.T @ x_rows
+             weight.grad = product if weight.grad is None else weight.grad
""")
