"""Wrong answers to exercise 13.6, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("13.6", "only this rank's tokens: the ranks' gradients of the weight").diff("""
Uses the parameters as they are.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return F.layer_norm(part, (part.shape[-1],), weight, bias)
""")
wrong("13.6", "f was applied to the tokens and added up gradients of different tokens").diff("""
Lets the tokens in through f.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return F.layer_norm(f(part), (part.shape[-1],), weight, bias)
""")
wrong("13.6", "f was applied to the output").diff("""
Lets the output leave through f.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return f(F.layer_norm(part, (part.shape[-1],), weight, bias))
""")
wrong("13.6", "only this rank's tokens: the ranks' gradients of the bias").diff("""
Forgets the bias.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return F.layer_norm(part, (part.shape[-1],), f(weight), bias)
""")
wrong("13.6", "a sum of sums").diff("""
Sums twice.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return F.layer_norm(part, (part.shape[-1],), f(f(weight)), f(f(bias)))
""")
wrong("13.6", "is a parameter and needs a gradient").diff("""
Detaches the parameters.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return F.layer_norm(part, (part.shape[-1],), weight.detach(), bias.detach())
""")
wrong("13.6", "over the last dimension").diff("""
Normalizes over the sequence as well.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return F.layer_norm(part, part.shape[1:]) * f(weight) + f(bias)
""")
wrong("13.6", "nothing else is sent").diff("""
Sums the outputs' gradients for nothing.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ part = part + 0 * f(part.detach().requires_grad_())
+ return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
""")
wrong("13.6", "belong to the caller").diff("""
Centres the tokens in place.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ part.data.sub_(part.data.mean(-1, keepdim=True))
+ return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
""")
wrong("13.6", "Mismatch in shape").diff("""
Drops dimensions of length 1.
- return F.layer_norm(part, (part.shape[-1],), f(weight), f(bias))
+ return F.layer_norm(part.squeeze(), (part.shape[-1],), f(weight), f(bias))
""")
