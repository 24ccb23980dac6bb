"""One process that has imported torch, and forks what would otherwise import it again: ranks, checks, commands.

`client.server` asks for a process, and first starts its server if there is none. The two are connected by a pair of
sockets without a name, which nobody else can reach. The server ends with the program that started it, also if that
program is killed. On macOS, whose frameworks do not survive a fork, each process imports torch itself.
"""
