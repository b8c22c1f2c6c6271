//! The contents of the screen.

use std::time::Duration;

use ferrite_seeing::rates::Rates;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::Wish;
use crate::plain::one_line;
use crate::seeing::table::{COLUMNS, NAME_WIDTH};

const KEYS: &str = "q ends  < > sort by  r reverses the order  arrows scroll";

/// The disks, and how they are shown.
pub(super) struct View {
    interval: Duration,
    disks: Vec<Rates>,
    /// The column to sort by; `None`: by the disks' numbers.
    sort: Option<usize>,
    reversed: bool,
    scroll: usize,
    problem: Option<String>,
    /// Titles and a line for each network interface; empty without any.
    interfaces: Vec<String>,
}

impl View {
    pub(super) fn new(interval: Duration) -> View {
        let (disks, sort, reversed) = (Vec::new(), None, false);
        View { interval, disks, sort, reversed, scroll: 0, problem: None, interfaces: vec![] }
    }

    /// Sets the disks, sorted by their numbers.
    pub(super) fn show(&mut self, disks: Vec<Rates>, problems: &[String]) {
        self.disks = disks;
        if let Some(problem) = problems.last() {
            self.problem = Some(one_line(problem).into_owned());
        }
    }

    /// Sets the lines of network interfaces, and what is wrong with their files.
    pub(super) fn show_interfaces(&mut self, lines: Vec<String>, problems: &[String]) {
        self.interfaces = lines;
        if let Some(problem) = problems.last() {
            self.problem = Some(one_line(problem).into_owned());
        }
    }

    pub(super) fn follow(&mut self, wish: Wish) {
        match wish {
            Wish::Quit | Wish::Stop => {}
            Wish::Sort(columns) => {
                let now = self.sort.map_or(0, |column| column as isize + 1);
                let all = COLUMNS.len() as isize + 1;
                self.sort = (now + columns).rem_euclid(all).checked_sub(1).map(|c| c as usize);
                self.sort = self.sort.filter(|column| *column < COLUMNS.len());
            }
            Wish::Reverse => self.reversed = !self.reversed,
            Wish::Scroll(lines) => {
                let last = self.disks.len().saturating_sub(1);
                self.scroll = self.scroll.saturating_add_signed(lines).min(last);
            }
        }
    }

    pub(super) fn draw(&self, frame: &mut Frame<'_>) {
        // An empty line is before them, and half of the room is for disks.
        let lines = self.interfaces.len() + usize::from(!self.interfaces.is_empty());
        let lines = lines.min(usize::from(frame.area().height.saturating_sub(3)) / 2) as u16;
        let [title, header, body, interfaces, keys] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Min(0),
            Constraint::Length(lines),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        frame.render_widget(Paragraph::new(self.title()), title);
        frame.render_widget(Paragraph::new(self.header()), header);
        frame.render_widget(Paragraph::new(self.lines()), body);
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let mut shown = vec![Line::default()];
        shown.extend(self.interfaces.iter().enumerate().map(|(at, line)| {
            let style = if at == 0 { bold } else { Style::new() };
            Line::styled(line.clone(), style)
        }));
        frame.render_widget(Paragraph::new(shown), interfaces);
        frame.render_widget(Paragraph::new(self.problem.as_deref().unwrap_or(KEYS)), keys);
    }

    fn title(&self) -> String {
        // The sum of no disks is a negative zero.
        let sum = |of: fn(&Rates) -> f64| self.disks.iter().map(of).sum::<f64>() + 0.0;
        let (requests, bytes) = (sum(|d| d.data.per_s), sum(|d| d.data.bytes_per_s) / 1e6);
        let (disks, seconds) = (self.disks.len(), self.interval.as_secs_f64());
        format!("{disks} disks, {requests:.0} IO/s, {bytes:.1} MB/s, every {seconds} s")
    }

    fn header(&self) -> Line<'static> {
        let mark = |is: bool| match is {
            true => Style::new().add_modifier(Modifier::REVERSED),
            false => Style::new().add_modifier(Modifier::BOLD),
        };
        let width = self.name_width();
        let mut spans =
            vec![Span::styled(format!("{:<width$}", "disk"), mark(self.sort.is_none()))];
        for (i, column) in COLUMNS.iter().enumerate() {
            let text = format!(" {:>w$}", column.title, w = column.width);
            spans.push(Span::styled(text, mark(self.sort == Some(i))));
        }
        spans.into()
    }

    fn lines(&self) -> Vec<Line<'static>> {
        let mut disks: Vec<&Rates> = self.disks.iter().collect();
        if let Some(column) = self.sort {
            disks.sort_by(|a, b| COLUMNS[column].order(a, b));
        }
        if self.reversed {
            disks.reverse();
        }
        let width = self.name_width();
        let line = |disk: &&Rates| {
            let mut text = format!("{:<width$}", one_line(&disk.name));
            COLUMNS.iter().for_each(|c| text += &format!(" {:>w$}", c.cell(disk), w = c.width));
            Line::from(text)
        };
        disks.iter().skip(self.scroll.min(disks.len().saturating_sub(1))).map(line).collect()
    }

    fn name_width(&self) -> usize {
        let names = self.disks.iter().map(|disk| disk.name.chars().count());
        names.max().unwrap_or(0).max(NAME_WIDTH)
    }
}
