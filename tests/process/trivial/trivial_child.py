"""A child that does nothing: says that it is up, and waits for its end."""

import os
import signal
import socket


def announce():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(str(os.getpid()).encode(), os.environ["LADDER_SOCKET"])


if __name__ == "__main__":
    announce()
    signal.pause()
