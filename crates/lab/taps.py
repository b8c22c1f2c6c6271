#!/usr/bin/env python3
"""The times of XAPI's verbs, and a guest's longest answer meanwhile: taps.py FERRITE [ROUNDS] [FOLDER].

FERRITE is the program, ROUNDS the number of measurements of each row (20), FOLDER one on a disk for the merge. Other
images are in /dev/shm. A line a row: median, smallest, largest.
"""
import glob
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time

FERRITE = os.path.abspath(sys.argv[1])
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 20
DISK = sys.argv[3] if len(sys.argv) > 3 else "/var/tmp"
MIB = 1 << 20


class Guest(threading.Thread):
    """A client of NBD that reads or writes 4 KiB, one request after the other, and knows its longest answer."""

    def __init__(self, path, size):
        super().__init__(daemon=True)
        self.stream, self.size = socket.socket(socket.AF_UNIX), size
        # The path may be longer than a socket's name.
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        self.stream.connect("/proc/self/fd/%d/%s" % (folder, os.path.basename(path)))
        os.close(folder)
        self.take(18)
        self.stream.sendall(struct.pack(">IQII", 3, 0x49484156454F5054, 1, 0))
        self.take(10)
        self.longest, self.count, self.ends = 0.0, 0, False
        self.start()

    def take(self, count):
        data = b""
        while len(data) < count:
            got = self.stream.recv(count - len(data))
            if not got:
                raise EOFError
            data += got
        return data

    def run(self):
        while not self.ends:
            write, at = self.count % 2, self.count * 4096 * 97 % self.size // 4096 * 4096
            began = time.monotonic()
            self.stream.sendall(struct.pack(">IHHQQI", 0x25609513, 0, write, self.count, at, 4096) + b"g" * 4096 * write)
            self.take(16 if write else 16 + 4096)
            self.longest = max(self.longest, time.monotonic() - began)
            self.count += 1

    def end(self):
        self.ends = True
        self.join()
        self.stream.close()


class Host:
    def __init__(self):
        self.dir = tempfile.mkdtemp(dir="/dev/shm")
        os.chdir(self.dir)
        with open("ferrite.toml", "w") as file:
            file.write('state_folder = "%s/state"\n' % self.dir)
        self.run_dir = self.dir + "/run"
        self.daemon = subprocess.Popen([FERRITE, "daemon", "--run-dir", self.run_dir, "--config", "ferrite.toml"],
                                       stderr=open("log", "w"))
        while subprocess.run(self.line("list"), capture_output=True).returncode:
            time.sleep(0.05)

    def line(self, verb, **options):
        given = [part for name, value in options.items() for part in ("-" + name, str(value))]
        return [FERRITE, "compat", "tap-ctl", verb] + given + ["--run-dir", self.run_dir]

    def tap(self, verb, **options):
        return subprocess.run(self.line(verb, **options), check=True, capture_output=True, text=True).stdout

    def vhd(self, *args):
        command = [FERRITE, "compat", "vhd-util", *map(str, args), "--run-dir=" + self.run_dir]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def open(self, image):
        minor = int(self.tap("allocate").rstrip().rsplit("-", 1)[1])
        pid = int(self.tap("spawn"))
        self.tap("attach", p=pid, m=minor)
        self.tap("open", p=pid, m=minor, a=image)
        return pid, minor

    def close(self, pid, minor):
        for verb in ("close", "detach"):
            self.tap(verb, p=pid, m=minor)
        while subprocess.run(self.line("free", m=minor), capture_output=True).returncode:
            pass

    def guest(self, pid, minor, size):
        return Guest("%s/blktap-control/nbd%d.%d" % (self.dir, pid, minor), size)


def row(name, times, unit=1000, suffix="ms"):
    middle, least, most = (unit * of(times) for of in (statistics.median, min, max))
    print("%-48s %8.1f %8.1f %8.1f %s" % (name, middle, least, most, suffix), flush=True)


def timed(work):
    began = time.monotonic()
    work()
    return time.monotonic() - began


def verbs(host):
    taps = []
    for number in range(100):
        with open("raw%d" % number, "wb") as file:
            file.truncate(MIB)
        taps.append(host.open("aio:%s/raw%d" % (host.dir, number)))
    pid, minor = taps[50]
    row("list, 100 taps", [timed(lambda: host.tap("list")) for _ in range(ROUNDS)])
    row("list -m, 100 taps", [timed(lambda: host.tap("list", m=minor)) for _ in range(ROUNDS)])
    row("stats, 100 taps", [timed(lambda: host.tap("stats", p=pid, m=minor)) for _ in range(ROUNDS)])
    with open("one", "wb") as file:
        file.truncate(MIB)
    opened, closed = [], []
    for _ in range(ROUNDS):
        began = time.monotonic()
        tap = host.open("aio:%s/one" % host.dir)
        host.tap("list", m=tap[1])
        opened.append(time.monotonic() - began)
        closed.append(timed(lambda tap=tap: host.close(*tap)))
    row("allocate to list, 100 taps", opened)
    row("close to free, 100 taps", closed)
    for tap in taps:
        host.close(*tap)


def chain(host):
    host.vhd("create", "-n", "c0.vhd", "-s", 64)
    for number in range(1, 30):
        host.vhd("snapshot", "-n", "c%d.vhd" % number, "-p", "c%d.vhd" % (number - 1), "-e")
    pid, minor = host.open("vhd:%s/c29.vhd" % host.dir)
    guest, answers, times = host.guest(pid, minor, 64 * MIB), [], []
    for _ in range(ROUNDS):
        guest.longest = 0
        began = time.monotonic()
        host.tap("pause", p=pid, m=minor)
        host.tap("unpause", p=pid, m=minor)
        times.append(time.monotonic() - began)
        time.sleep(0.1)
        answers.append(guest.longest)
    row("pause and unpause, chain of 30: verbs", times)
    row("pause and unpause, chain of 30: longest answer", answers)
    guest.end()
    host.close(pid, minor)


def flows(host):
    """SM's snapshot, and its coalesce with relink and refresh, below a guest."""
    host.vhd("create", "-n", "leaf.vhd", "-s", 64)
    pid, minor = host.open("vhd:%s/leaf.vhd" % host.dir)
    guest, snapshots, merges = host.guest(pid, minor, 64 * MIB), [], []
    for number in range(ROUNDS):
        time.sleep(0.3)
        guest.longest = 0
        for name in ("a%d.vhd" % number, "b%d.vhd" % number):
            time.sleep(0.2)
            host.tap("pause", p=pid, m=minor)
            os.link("leaf.vhd", name)
            host.vhd("snapshot", "-n", "leaf.new", "-p", name, "-e")
            os.rename("leaf.new", "leaf.vhd")
            host.vhd("snapshot", "-n", "s" + name, "-p", name, "-e")
            host.vhd("set", "-n", name, "-f", "hidden", "-v", 1)
            host.tap("unpause", p=pid, m=minor)
        time.sleep(0.1)
        snapshots.append(guest.longest)
        guest.longest = 0
        below, above = "a%d.vhd" % number, "b%d.vhd" % number
        host.vhd("check", "-n", above)
        host.vhd("coalesce", "-n", above)
        host.vhd("modify", "-p", below, "-n", "leaf.vhd")
        host.tap("pause", p=pid, m=minor)
        host.tap("unpause", p=pid, m=minor)
        os.unlink(above)
        os.unlink("s" + above)
        time.sleep(0.1)
        merges.append(guest.longest)
        # The chain stays short: all is in the first image again.
        if below != "a0.vhd":
            host.vhd("coalesce", "-n", below)
            host.vhd("modify", "-p", "a0.vhd", "-n", "leaf.vhd")
            host.tap("pause", p=pid, m=minor)
            host.tap("unpause", p=pid, m=minor)
            os.unlink(below)
        os.unlink("s" + below)
    row("SM's snapshot: longest answer", snapshots)
    row("coalesce, relink, refresh: longest answer", merges)
    guest.end()
    host.close(pid, minor)


def scan(host):
    os.mkdir("many")
    host.vhd("create", "-n", "many/0.vhd", "-s", 64)
    for number in range(1, 300):
        shutil.copy("many/0.vhd", "many/%d.vhd" % number)
    row("scan of 300", [timed(lambda: host.vhd("scan", "-f", "-c", "-m", "many/*.vhd")) for _ in range(ROUNDS)])


def run(command):
    began = time.monotonic()
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=[
        (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)])
    _, status, used = os.wait4(pid, 0)
    assert status == 0, command
    return time.monotonic() - began, used.ru_maxrss / 1024


def coalesce(host, size=256):
    """Both merges of the same pair of images on a disk, in turn."""
    folder = tempfile.mkdtemp(dir=DISK)
    os.chdir(folder)
    with open("data.img", "wb") as file:
        for _ in range(size):
            file.write(os.urandom(MIB))
    host.vhd("create", "-n", "base.vhd", "-s", size)
    host.vhd("snapshot", "-n", "child.vhd", "-p", "base.vhd", "-e")
    subprocess.run([FERRITE, "image", "convert", "-n", "data.img", "child.vhd"], check=True, stdout=subprocess.DEVNULL)
    os.mkdir("whole")
    for name in ("base.vhd", "child.vhd"):
        shutil.move(name, "whole")
    ratios, ours, memory = [], [], []
    for number in range(ROUNDS):
        times = {}
        for which in (0, 1) if number % 2 else (1, 0):
            for name in ("base.vhd", "child.vhd"):
                shutil.copy("whole/" + name, name)
            os.sync()
            tool = [FERRITE, "compat", "vhd-util", "coalesce", "-n", "child.vhd", "--run-dir=" + host.run_dir]
            times[which], used = run(tool if which else [FERRITE, "image", "coalesce", "child.vhd"])
            if which:
                memory.append(used)
            for name in glob.glob("*.vhd"):
                os.unlink(name)
        ours.append(times[1])
        ratios.append(times[0] / times[1])
    row("vhd-util coalesce of %d MiB" % size, ours)
    row("its rate, of that of image coalesce", ratios, 1, "times")
    row("its memory", memory, 1, "MiB")
    os.chdir("/")
    shutil.rmtree(folder)


def main():
    host = Host()
    print("%s, load %s, %s processors" % (time.strftime("%F %H:%M"), open("/proc/loadavg").read().split()[0], os.cpu_count()))
    print("%-48s %8s %8s %8s" % ("", "median", "least", "most"))
    try:
        for part in (verbs, chain, flows, scan, coalesce):
            os.chdir(host.dir)
            part(host)
    finally:
        host.daemon.terminate()
        host.daemon.wait()
        os.chdir("/")
        shutil.rmtree(host.dir, ignore_errors=True)


main()
