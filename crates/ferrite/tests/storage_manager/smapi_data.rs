//! XAPI's calls on the data of a running guest's disk (SMAPIv3): mirrors.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::Path;

use ferrite_testkit::nbd::Client;
use ferrite_testkit::wait_until;
use serde_json::{Value, json};

use crate::xapi::{Daemon, Host, MIB, kind};

/// A copy ends when it is complete; that of a mirrored disk is the mirror.
fn copies(host: &Host, of_uri: &Value, far: &Path) {
    File::create(far).unwrap().set_len(4 * MIB).unwrap();
    let mut asked = of_uri.clone();
    assert_eq!(kind(host.datapath("Data.copy", asked.clone())), "Invalid_parameters");
    asked["blocklist"] = json!({ "blocksize": 65536, "ranges": [[0, 1]] });
    let key = host.datapath("Data.copy", asked.clone()).unwrap();
    assert_eq!(key[0], "CopyV1");
    let operation = json!({ "operation": key });
    let complete = json!({ "failed": false, "complete": true, "progress": 1.0 });
    let stat = |of: &Value| host.datapath("Data.stat", of.clone()).unwrap();
    wait_until("a complete copy", || stat(&operation)["complete"] == true);
    wait_until("no mirror", || host.datapath("Data.ls", of_uri.clone()).unwrap() == json!([]));
    assert_eq!((stat(&operation), fs::read(far).unwrap()[0]), (complete.clone(), 9));
    for _ in 0..2 {
        host.datapath("Data.destroy", operation.clone()).unwrap();
    }
    let mirror = host.datapath("Data.mirror", of_uri.clone()).unwrap();
    let key = host.datapath("Data.copy", asked).unwrap();
    let operation = json!({ "operation": key });
    wait_until("a mirror", || stat(&operation) == complete);
    host.datapath("Data.destroy", operation).unwrap();
    assert_eq!(host.datapath("Data.ls", of_uri.clone()).unwrap(), json!([mirror]));
    host.datapath("Data.destroy", json!({ "operation": mirror })).unwrap();
}

#[test]
fn the_target_of_storage_motion_has_a_socket_and_a_disk_that_is_only_read_none() {
    let host = Host::new();
    let daemon = Daemon::start(&host);
    let repository = host.repository();
    let disk = repository.create("web", 4 * MIB);
    let of_uri = json!({ "uri": repository.stat(&disk)["uri"][0], "domain": "3" });
    host.datapath("Datapath.attach", of_uri.clone()).unwrap();
    let flags = || {
        let link = host.path("run/blktap-control/nbd/ferrite");
        let link = fs::read_dir(link).unwrap().next().unwrap().unwrap().path();
        // A link may have a longer name than a socket.
        let socket = link.canonicalize().unwrap();
        let mut client = Client::over(UnixStream::connect(socket).unwrap());
        client.go(false).1
    };
    const READ_ONLY: u16 = 2;
    for _ in 0..2 {
        host.datapath("Datapath.activate_readonly", of_uri.clone()).unwrap();
        assert_eq!(flags() & READ_ONLY, READ_ONLY);
    }
    let socket = host.datapath("Datapath.import_activate", of_uri.clone()).unwrap();
    assert_eq!(flags() & READ_ONLY, 0);
    let socket = socket.as_str().unwrap();
    assert!(socket.contains("/nbdserver") && UnixStream::connect(socket).is_ok(), "{socket}");
    for call in ["Datapath.deactivate", "Datapath.detach"] {
        host.datapath(call, of_uri.clone()).unwrap();
    }
    assert!(UnixStream::connect(socket).is_err());
    drop(daemon);
}

#[test]
fn an_active_disk_is_mirrored_to_an_export_until_that_is_cancelled() {
    let host = Host::new();
    let daemon = Daemon::start(&host);
    let repository = host.repository();
    let disk = repository.create("web", 4 * MIB);
    repository.write(&disk, 9);
    let [far, socket] = ["far.img", "far.sock"].map(|name| host.path(name));
    File::create(&far).unwrap().set_len(4 * MIB).unwrap();
    let mut export = host.command("ferrite");
    let mut export =
        export.args(["export", "nbd", "--socket"]).arg(&socket).arg(&far).spawn().unwrap();
    wait_until("a server", || UnixStream::connect(&socket).is_ok());
    let uri = repository.stat(&disk)["uri"][0].clone();
    let remote = format!("nbd+unix:///?socket={}", socket.display());
    let of_uri = json!({ "uri": uri, "domain": "3", "remote": remote });
    for call in ["Datapath.attach", "Datapath.activate"] {
        if call == "Datapath.activate" {
            assert_eq!(kind(host.datapath("Data.mirror", of_uri.clone())), "Ferrite_error");
        }
        host.datapath(call, of_uri.clone()).unwrap();
    }
    let key = host.datapath("Data.mirror", of_uri.clone()).unwrap();
    assert_eq!(key, json!(["MirrorV1", "1"]));
    assert_eq!(host.datapath("Data.mirror", of_uri.clone()).unwrap(), key);
    assert_eq!(host.datapath("Data.ls", of_uri.clone()).unwrap(), json!([key]));
    let operation = json!({ "operation": key });
    let stat = || host.datapath("Data.stat", operation.clone()).unwrap();
    wait_until("a complete mirror", || stat()["complete"] == true);
    assert_eq!(stat(), json!({ "failed": false, "complete": true, "progress": 1.0 }));
    assert_eq!(fs::read(&far).unwrap()[0], 9);
    for call in ["Data.cancel", "Data.destroy", "Data.destroy"] {
        assert_eq!(host.datapath(call, operation.clone()).unwrap(), Value::Null);
    }
    assert_eq!((&stat()["complete"], &stat()["failed"]), (&json!(false), &json!(true)));
    assert_eq!(host.datapath("Data.ls", of_uri.clone()).unwrap(), json!([]));
    copies(&host, &of_uri, &far);
    let none = json!({ "operation": ["CopyV2", "1"] });
    assert_eq!(kind(host.datapath("Data.stat", none)), "Invalid_parameters");
    for call in ["Datapath.deactivate", "Datapath.detach"] {
        host.datapath(call, of_uri.clone()).unwrap();
    }
    export.kill().unwrap();
    export.wait().unwrap();
    drop(daemon);
}
