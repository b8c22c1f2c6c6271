//! A request of several steps continues at once, however long its queue polls for the next one.

use ferrite_loopback::front::FrontOptions;
use ferrite_serve::polling::PollWindow;
use ferrite_serve::tuning::Tuning;
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, images};

/// Longer than any test waits.
const WINDOW_US: u32 = 3_600_000_000;

#[test]
fn no_step_of_a_request_waits_for_the_end_of_polling() {
    for format in images::FORMATS {
        let dir = dir_in_memory();
        let image = Some(images::make(dir.path(), format, 8 << 20));
        let tuning = Tuning { poll: PollWindow::Fixed(WINDOW_US), merge: true };
        let rig = Rig::new(Plan { image, tuning, ..Plan::default() });
        let mut front = rig.connect(&FrontOptions::default());
        let buffer = front.space().buffer(1).unwrap();
        let queue = &mut front.queues[0];
        buffer.fill(0, 4096, 0xA1);
        // New space, its metadata, and the syncs between them.
        queue.write(0, &buffer, 0, 4096).unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok(), "{format}");
        queue.flush().unwrap();
        assert!(queue.next_reply(PATIENCE).unwrap().is_ok(), "{format}");
        front.close(PATIENCE).unwrap();
    }
}
