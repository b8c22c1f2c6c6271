//! `ferrite top`: statistics of all disks on a terminal, updated repeatedly.

use std::io::{self, IsTerminal as _};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::consts::{SIGCONT, SIGTSTP};

use super::Watch;
use super::args::TopArgs;
use super::stat::heard;
use crate::exit::{Code, Failure};

mod interfaces;
mod screen;
mod view;

use interfaces::Interfaces;
use screen::Screen;
use view::View;

/// The longest delay until a signal is handled.
const GLANCE: Duration = Duration::from_millis(100);

/// The exit code without a terminal: the one that a shell gives for SIGHUP.
const TERMINAL_GONE: i32 = 129;

/// The effect of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Quit,
    /// Stop the process, as Ctrl-Z does.
    Stop,
    /// Sort by another column: so many to the right.
    Sort(isize),
    Reverse,
    /// Scroll so many lines down.
    Scroll(isize),
}

/// Shows the disks until it is asked to end.
pub(crate) fn run(args: &TopArgs) -> Result<(), Failure> {
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        let why = "standard input and output are no terminal";
        let help = "ferrite stat -i 1 prints the same as text, with --json for programs";
        return Err(Failure::new("cannot show disks", why, help).with_code(Code::USAGE));
    }
    let signals = heard(&[SIGTSTP, SIGCONT])?;
    let mut watch = Watch::new(&args.watched)?;
    // The folder may be invalid: that is reported before the terminal changes.
    let first = watch.look()?;
    let mut view = View::new(args.interval);
    view.show(first.rates, &first.problems);
    let mut interfaces = Interfaces::new(&args.interfaces);
    interfaces.look(&mut view);
    end_with_terminal();
    let mut screen = Screen::enter().map_err(broken)?;
    let mut next = Instant::now() + args.interval;
    loop {
        screen.show(&view).map_err(broken)?;
        while Instant::now() < next {
            match told(&signals) {
                Told::Nothing => {}
                Told::Stop => screen.stop().and_then(|()| screen.show(&view)).map_err(broken)?,
                Told::Continue => {
                    screen.again().and_then(|()| screen.show(&view)).map_err(broken)?
                }
                Told::End => return Ok(()),
            }
            let left = next.saturating_duration_since(Instant::now());
            if !event::poll(left.min(GLANCE)).map_err(broken)? {
                continue;
            }
            match event::read().map_err(broken)? {
                Event::Key(key) => match wish(key) {
                    Some(Wish::Quit) => return Ok(()),
                    Some(Wish::Stop) => screen.stop().map_err(broken)?,
                    Some(wish) => view.follow(wish),
                    None => continue,
                },
                Event::Resize(..) => {}
                _ => continue,
            }
            screen.show(&view).map_err(broken)?;
        }
        next = (next + args.interval).max(Instant::now());
        let look = watch.look()?;
        view.show(look.rates, &look.problems);
        interfaces.look(&mut view);
    }
}

/// Ends the program when its terminal is gone. crossterm reads the end of a terminal again and again and never returns.
/// SIGHUP does not come where it is ignored (under nohup). So a thread waits for the hangup itself.
fn end_with_terminal() {
    std::thread::spawn(|| {
        let stdin = io::stdin();
        loop {
            // No event is asked for: HUP and ERR are always reported.
            let mut fds = [PollFd::new(&stdin, PollFlags::empty())];
            let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
            match poll(&mut fds, None) {
                Ok(_) if fds[0].revents().intersects(gone) => std::process::exit(TERMINAL_GONE),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    });
}

/// The effect of a signal.
enum Told {
    Nothing,
    Stop,
    /// The process was stopped and continues: other programs have used the terminal.
    Continue,
    End,
}

fn told(signals: &Receiver<std::ffi::c_int>) -> Told {
    match signals.try_recv() {
        Err(TryRecvError::Empty) => Told::Nothing,
        Ok(SIGTSTP) => Told::Stop,
        Ok(SIGCONT) => Told::Continue,
        Ok(_) | Err(TryRecvError::Disconnected) => Told::End,
    }
}

fn broken(e: io::Error) -> Failure {
    Failure::new("cannot use the terminal", e, "ferrite stat -i 1 prints the same as text")
}

fn wish(key: KeyEvent) -> Option<Wish> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c') if control => Some(Wish::Quit),
        KeyCode::Char('z') if control => Some(Wish::Stop),
        KeyCode::Char('q') | KeyCode::Esc => Some(Wish::Quit),
        KeyCode::Left | KeyCode::Char('<') => Some(Wish::Sort(-1)),
        KeyCode::Right | KeyCode::Char('>') => Some(Wish::Sort(1)),
        KeyCode::Char('r') => Some(Wish::Reverse),
        KeyCode::Up => Some(Wish::Scroll(-1)),
        KeyCode::Down => Some(Wish::Scroll(1)),
        KeyCode::PageUp => Some(Wish::Scroll(-10)),
        KeyCode::PageDown => Some(Wish::Scroll(10)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
