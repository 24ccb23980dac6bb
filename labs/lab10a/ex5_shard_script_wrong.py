"""Wrong answers to exercise 10a.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("10a.5", "it trains nothing").diff("""
Builds the optimizer where it stood in the DDP script.
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
- return sharded, AdamW(sharded.parameters(), lr=1e-3)
+ optimizer = AdamW(model.parameters(), lr=1e-3)
+ init = make_init(model)
+ return FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=init, device_id=where), optimizer
""")
wrong("10a.5", "all of it is one unit, whole from forward").diff("""
The wrap alone.
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
+ sharded = FullyShardedDataParallel(model, param_init_fn=make_init(model), device_id=where)
""")


@wrong("10a.5", "was in memory: build it on meta")
def shard_script(build, blocks, make_init, where):
    """Builds and initializes the whole model first."""
    model = build().to(where)
    init = make_init(model)
    for module in reversed(list(model.modules())):
        init(module)
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=where)
    return sharded, AdamW(sharded.parameters(), lr=1e-3)


wrong("10a.5", "is not how this model is initialized").diff("""
Leaves the values to `reset_parameters`.
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
+ sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=where)
""")
wrong("10a.5", "the tied head and the embedding both stay with the root").diff("""
Makes a unit of every layer, the tied head's among them.
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
+ policy = {*blocks, nn.Linear, nn.Embedding}
+ sharded = FullyShardedDataParallel(model, auto_wrap_policy=policy, param_init_fn=make_init(model), device_id=where)
""")
wrong("10a.5", "which is DDP in FSDP's clothes").diff("""
Wraps without sharding.
  def shard_script(build, blocks, make_init, where):
+     from minifsdp.fsdp import ShardingStrategy
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
+ sharded = FullyShardedDataParallel(
+     model,
+     sharding_strategy=ShardingStrategy.NO_SHARD,
+     auto_wrap_policy=blocks,
+     param_init_fn=make_init(model),
+     device_id=where,
+ )
""")


@wrong("10a.5", "times that build was called")
def shard_script(build, blocks, make_init, where):
    """Builds a model for the names and another to train."""
    with torch.device("meta"):
        named, model = build(), build()
    init = make_init(named)
    del named
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=where)
    return sharded, AdamW(sharded.parameters(), lr=1e-3) if init else None


wrong("10a.5", "the wrapped model and its optimizer, in this order").diff("""
Returns them the other way round.
- return sharded, AdamW(sharded.parameters(), lr=1e-3)
+ return AdamW(sharded.parameters(), lr=1e-3), sharded
""")
wrong("10a.5", "there is nothing to send").diff("""
Sends from rank 0 what every rank has computed.
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
+ sharded = FullyShardedDataParallel(
+     model,
+     auto_wrap_policy=blocks,
+     param_init_fn=make_init(model),
+     device_id=where,
+     sync_module_states=True,
+ )
""")
wrong("10a.5", "parameters that stay whole from forward to backward").diff("""
Does not free parameters between forward and backward.
  def shard_script(build, blocks, make_init, where):
+     from minifsdp.fsdp import ShardingStrategy
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
+ sharded = FullyShardedDataParallel(
+     model,
+     sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
+     auto_wrap_policy=blocks,
+     param_init_fn=make_init(model),
+     device_id=where,
+ )
""")
wrong("10a.5", "an object of type FullyShardedDataParallel").diff("""
Leaves the optimizer to the caller.
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
- return sharded, AdamW(sharded.parameters(), lr=1e-3)
+ return FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
""")
wrong("10a.5", "leave the others as they are").diff("""
AdamW without weight decay.
- return sharded, AdamW(sharded.parameters(), lr=1e-3)
+ return sharded, AdamW(sharded.parameters(), lr=1e-3, weight_decay=0.0)
""")
wrong("10a.5", "betas: [0.9, 0.95]").diff("""
AdamW with betas of its own.
- return sharded, AdamW(sharded.parameters(), lr=1e-3)
+ return sharded, AdamW(sharded.parameters(), lr=1e-3, betas=(0.9, 0.95))
""")
wrong("10a.5", "`device_id=where`").diff("""
Says nothing of where to compute.
- sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model), device_id=where)
+ sharded = FullyShardedDataParallel(model, auto_wrap_policy=blocks, param_init_fn=make_init(model))
""")
wrong("10a.5", "another one is another training").diff("""
Adam.
- return sharded, AdamW(sharded.parameters(), lr=1e-3)
+ return sharded, torch.optim.Adam(sharded.parameters(), lr=1e-3)
""")
wrong("10a.5", "wrapping casts nothing").diff("""
Has every model in float32.
- model = build()
+ model = build().float()
""")
wrong("10a.5", "`eval` switches dropout off").diff("""
Leaves the model in evaluation mode.
- model = build()
+ model = build().eval()
""")
wrong("10a.5", "is for `build` alone").diff("""
Leaves the default device on meta.
- with torch.device("meta"):
-     model = build()
+ torch.set_default_device("meta")
+ model = build()
""")
