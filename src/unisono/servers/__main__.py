"""The program of a server process, which the launcher starts."""

from unisono.servers.server import main

main()
