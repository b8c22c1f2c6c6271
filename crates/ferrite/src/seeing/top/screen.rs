//! The terminal: taken, released while the process is stopped, and restored.

use std::io;

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::{DefaultTerminal, Terminal};
use signal_hook::consts::SIGTSTP;
use signal_hook::low_level::emulate_default_handler;

use super::view::View;

/// The whole screen. Restored when this is dropped, and by ratatui's own hook on a panic.
pub(super) struct Screen(DefaultTerminal);

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

impl Screen {
    /// Takes the terminal.
    pub(super) fn enter() -> io::Result<Screen> {
        ratatui::try_init().map(Screen)
    }

    pub(super) fn show(&mut self, view: &View) -> io::Result<()> {
        self.0.draw(|frame| view.draw(frame)).map(drop)
    }

    /// Releases the terminal to the shell until this process is continued.
    pub(super) fn stop(&mut self) -> io::Result<()> {
        self.0.show_cursor()?;
        ratatui::try_restore()?;
        emulate_default_handler(SIGTSTP)?;
        self.again()
    }

    /// Takes the terminal again, in whatever state other programs left it.
    pub(super) fn again(&mut self) -> io::Result<()> {
        // Its record of the terminal's mode may be outdated.
        disable_raw_mode()?;
        enable_raw_mode()?;
        execute!(io::stdout(), EnterAlternateScreen, Clear(ClearType::All))?;
        // A new `Terminal` draws everything. Clearing the old one would ask the terminal for its cursor, and wait for
        // the answer.
        self.0 = Terminal::new(CrosstermBackend::new(io::stdout()))?;
        Ok(())
    }
}
