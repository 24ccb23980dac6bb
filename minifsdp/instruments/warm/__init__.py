"""One process that has imported torch, and forks what would otherwise import it again: ranks, checks, commands.

`client.server` asks for a process, and first starts its server if there is none. A pair of sockets
without a name connects the two, out of reach for other programs. The server ends with its program, even if that is
killed. On macOS, whose frameworks do not survive a fork, each process imports torch itself.
"""
