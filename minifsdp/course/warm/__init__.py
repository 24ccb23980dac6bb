"""One process that has imported torch, and forks what would otherwise import it again: ranks, checks, commands.

`client.start` asks the server for a process and starts the server first if there is none. The two share a pair of
sockets without a name: nobody else can reach the server, and it ends when the program that started it does, whatever
ends that. On macOS, whose frameworks do not survive a fork, each process imports torch itself.
"""
