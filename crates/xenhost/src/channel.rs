//! Commands to dom0 over a virtio-serial port, and their answers.

use anyhow::{Context, Result, bail};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// The result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The exit status; 124 or 137 after its time limit.
    pub status: i32,
    /// Standard output and error.
    pub stdout: String,
}

impl Output {
    /// Whether the command ran out of time.
    pub fn timed_out(&self) -> bool {
        self.status == 124 || self.status == 137
    }
}

/// The longest answer; a longer one is a broken frame.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// The host's end of the port.
pub(crate) struct Channel {
    stream: UnixStream,
    buffer: Vec<u8>,
    next_id: u64,
}

impl Channel {
    /// Connects to QEMU, which may still be starting.
    pub(crate) fn connect(socket: &Path, patience: Duration) -> Result<Channel> {
        let deadline = Instant::now() + patience;
        loop {
            match UnixStream::connect(socket) {
                Ok(stream) => return Ok(Channel { stream, buffer: Vec::new(), next_id: 1 }),
                Err(error) if Instant::now() > deadline => {
                    return Err(error).context("QEMU does not open its control socket");
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Waits until the agent in dom0 answers.
    pub(crate) fn wait_ready(&mut self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        let line = self.line(deadline)?;
        if line != "ready" {
            bail!("the dom0's agent said {line:?} instead of \"ready\"");
        }
        Ok(())
    }

    /// Runs `command` in dom0, for at most `limit`; its answer must come within `grace` after that.
    pub(crate) fn run(
        &mut self,
        command: &str,
        limit: Duration,
        grace: Duration,
    ) -> Result<Output> {
        let id = self.next_id;
        self.next_id += 1;
        let seconds = limit.as_secs().max(1);
        let request = format!("{id} {seconds} {}\n", escape(command));
        self.stream.write_all(request.as_bytes()).context("cannot send to the dom0")?;
        let deadline = Instant::now() + limit + grace;
        loop {
            let header = self.line(deadline)?;
            let (answered, status, length) = parse_header(&header)
                .with_context(|| format!("a broken answer from the dom0: {header:?}"))?;
            let bytes = self.take(length, deadline)?;
            // A late answer to an earlier request is skipped.
            if answered == id {
                let stdout = String::from_utf8_lossy(&bytes).into_owned();
                return Ok(Output { status, stdout });
            }
        }
    }

    fn line(&mut self, deadline: Instant) -> Result<String> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Ok(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            self.fill(deadline)?;
        }
    }

    fn take(&mut self, length: usize, deadline: Instant) -> Result<Vec<u8>> {
        while self.buffer.len() < length {
            self.fill(deadline)?;
        }
        Ok(self.buffer.drain(..length).collect())
    }

    fn fill(&mut self, deadline: Instant) -> Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!("no answer from the dom0 in time");
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut chunk = [0; 64 << 10];
        match self.stream.read(&mut chunk) {
            Ok(0) => bail!("the machine ended"),
            Ok(count) => self.buffer.extend_from_slice(&chunk[..count]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                bail!("no answer from the dom0 in time")
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error).context("cannot read from the dom0"),
        }
        Ok(())
    }
}

/// Parses `ID STATUS LENGTH`.
fn parse_header(line: &str) -> Option<(u64, i32, usize)> {
    let mut words = line.split(' ');
    let header = (
        words.next()?.parse().ok()?,
        words.next()?.parse().ok()?,
        words.next()?.parse().ok().filter(|length| *length <= MAX_ANSWER_BYTES)?,
    );
    words.next().is_none().then_some(header)
}

/// A command as one line, for `printf %b`.
pub(crate) fn escape(command: &str) -> String {
    command.trim().replace('\\', "\\\\").replace('\n', "\\n")
}

/// A word quoted for the shell.
pub fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Channel, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        (Channel { stream: ours, buffer: Vec::new(), next_id: 1 }, theirs)
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn an_answer_may_hold_what_looks_like_a_header() {
        let (mut channel, mut dom0) = pair();
        dom0.write_all(b"1 3 9\n1 0 3\nabc").expect("written");
        let output = channel.run("x", SECOND, SECOND).expect("an answer");
        assert_eq!(output, Output { status: 3, stdout: "1 0 3\nabc".into() });
    }

    #[test]
    fn a_late_answer_is_not_taken_for_the_next_one() {
        let (mut channel, mut dom0) = pair();
        channel.next_id = 2;
        dom0.write_all(b"1 0 4\nlate2 0 4\ngood").expect("written");
        assert_eq!(channel.run("x", SECOND, SECOND).expect("an answer").stdout, "good");
    }

    #[test]
    fn silence_ends_in_an_error_not_in_a_hang() {
        let (mut channel, _dom0) = pair();
        let error = channel.run("x", Duration::ZERO, Duration::from_millis(20));
        assert!(error.is_err());
    }

    #[test]
    fn a_command_of_several_lines_travels_in_one() {
        assert_eq!(escape("a\\n\nb"), "a\\\\n\\nb");
        assert_eq!(quote("it's"), "'it'\\''s'");
    }
}
