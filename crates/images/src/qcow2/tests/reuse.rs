//! Clusters that become free while an image is open.

use std::cell::Cell;

use super::trouble::one_within_another;
use super::*;

/// The count of the cluster with the compressed data, the last one of a new image.
fn count(qcow2: &Qcow2, cluster: u64) -> u64 {
    qcow2.state().clusters.refs().get(cluster).unwrap()
}

/// The host cluster of the compressed data.
fn packed_cluster(qcow2: &Qcow2) -> u64 {
    let entry = qcow2.entry(0).unwrap();
    let Some(Cluster::Packed(packed)) = qcow2.decode(entry) else { panic!("{entry:#x}") };
    *packed.clusters(16).start()
}

#[test]
fn compressed_data_stay_until_who_began_to_read_them_is_done() {
    // The reader is dropped after so many polls, or waited for.
    for times in 1..6 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.qcow2");
        compressed(&path);
        let mut session = open(&path);
        session.read(65536, &mut [0; 512]).unwrap();
        let (disk, port) = (session.disk().clone(), session.port().clone());
        let qcow2 = qcow2_of(&disk);
        let cluster = packed_cluster(qcow2);
        let is_read = Cell::new(false);
        let read = async {
            let piece = port.scratch.take(4096).await;
            disk.read(&port, 0, piece.span()).await.unwrap();
            let mut bytes = [0; 4096];
            port.memory().copy_out(piece.span(), &mut bytes);
            assert_eq!(bytes, [9; 4096]);
            is_read.set(true);
        };
        let replace = async {
            let piece = port.scratch.take(4096).await;
            port.memory().fill(piece.span(), 1);
            disk.write(&port, 0, piece.span()).await.unwrap();
            for _ in 0..3 {
                qcow2.commit(&port).await.unwrap();
            }
            assert_eq!(count(qcow2, cluster), 0);
            let found = qcow2.alloc.reuse(&port, 1).await.unwrap();
            let is_found = found.iter().any(|run| run.next == cluster);
            assert_eq!(is_found, is_read.get(), "after {times} polls");
            qcow2.state().clusters.unclaim();
        };
        session.run(one_within_another(read, times, replace)).unwrap();
        for _ in 0..2 {
            session.flush().unwrap();
        }
        let found = session.run(async { qcow2.alloc.reuse(&port, 1).await.unwrap() }).unwrap();
        assert_eq!(found.iter().map(|run| run.next).collect::<Vec<_>>(), [cluster]);
        qcow2.state().clusters.unclaim();
        drop((disk, port));
        session.close().unwrap();
        assert!(check(&medium(&path)).unwrap().is_clean());
    }
}

/// A dead process's journal is checked against the counts on disk.
#[test]
fn a_cluster_is_not_given_out_before_its_count_is_down_on_disk() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.qcow2");
    compressed(&path);
    let mut session = open(&path);
    session.read(0, &mut [0; 512]).unwrap();
    let (disk, port) = (session.disk().clone(), session.port().clone());
    let qcow2 = qcow2_of(&disk);
    let cluster = packed_cluster(qcow2);
    let found = |session: &mut Session| {
        let found = session.run(async { qcow2.alloc.reuse(&port, 1).await.unwrap() }).unwrap();
        qcow2.state().clusters.unclaim();
        found.iter().any(|run| run.next == cluster)
    };
    session.write(0, &[1; 65536]).unwrap();
    assert!(!found(&mut session), "its entry is on disk");
    session.flush().unwrap();
    assert!(!found(&mut session), "its count is on disk");
    session.run(async { qcow2.alloc.lower_counts(&port).await.unwrap() }).unwrap();
    assert!(!found(&mut session), "its count is down in memory only");
    session.flush().unwrap();
    assert!(found(&mut session));
    session.close().unwrap();
}

/// When the task is dropped, a write to its fresh cluster may be in flight.
#[test]
fn a_task_that_is_dropped_while_it_makes_a_table_or_copies_leaks_nothing() {
    for times in 1..40 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.qcow2");
        compressed(&path);
        let mut session = open(&path);
        let (disk, port) = (session.disk().clone(), session.port().clone());
        let qcow2 = qcow2_of(&disk);
        let write = async {
            let piece = port.scratch.take(512).await;
            port.memory().fill(piece.span(), 1);
            disk.write(&port, 512, piece.span()).await.unwrap();
        };
        let some = async {
            let mut write = std::pin::pin!(write);
            let mut left = times;
            std::future::poll_fn(|cx| {
                left -= 1;
                match write.as_mut().poll(cx).is_ready() || left == 0 {
                    true => std::task::Poll::Ready(()),
                    false => std::task::Poll::Pending,
                }
            })
            .await;
        };
        session.run(some).unwrap();
        assert!(qcow2.state().copying.is_empty());
        session.flush().unwrap();
        drop((disk, port));
        session.close().unwrap();
        let report = check(&medium(&path)).unwrap();
        assert!(report.is_clean(), "after {times} polls: {report:?}");
    }
}
