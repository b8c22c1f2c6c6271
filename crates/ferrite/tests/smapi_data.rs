//! XAPI's calls on the data of a running guest's disk (SMAPIv3): mirrors.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;

use ferrite_testkit::wait_until;
use serde_json::{Value, json};

#[allow(dead_code, reason = "a module of several tests, not all of which use all")]
mod xapi;

use xapi::{Daemon, Host, MIB, kind};

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
    let none = json!({ "operation": ["CopyV1", "1"] });
    assert_eq!(kind(host.datapath("Data.stat", none)), "Invalid_parameters");
    for call in ["Datapath.deactivate", "Datapath.detach"] {
        host.datapath(call, of_uri.clone()).unwrap();
    }
    export.kill().unwrap();
    export.wait().unwrap();
    drop(daemon);
}
