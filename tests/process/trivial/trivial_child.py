"""A child that does nothing: says that it is up, and waits for its end. LADDER_IMPORTS names what it imports before."""

import importlib
import os
import signal
import socket

if os.environ.get("LADDER_IMPORTS"):
    importlib.import_module(os.environ["LADDER_IMPORTS"])


def announce():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(str(os.getpid()).encode(), os.environ["LADDER_SOCKET"])


if __name__ == "__main__":
    announce()
    signal.pause()
