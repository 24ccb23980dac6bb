"""All that a drop-in for torch's FSDP needs beside the lesson: arguments, policies, deferred initialization, state."""
