//! XAPI's plug-ins (SMAPIv3), called as `xapi-storage-script` calls them: a program for each call, with the parameters
//! as JSON on its standard input and the bare result on its standard output.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use ferrite_testkit::nbd::Client;
use ferrite_testkit::programs::installed;
use serde_json::{Value, json};

use crate::xapi::{
    DATAPATH, Daemon, Host, MIB, Repository, VOLUME, answer, key, kind, plugins, set, sr_params,
};

#[test]
fn both_plug_ins_describe_themselves_and_have_the_programs_that_xapi_looks_for() {
    let host = Host::new();
    for (folder, plugin) in [(DATAPATH, "ferrite"), (VOLUME, "ferrite")] {
        let query = host.call(folder, "Plugin.Query", &json!({ "dbg": "test" })).unwrap();
        assert_eq!(
            (&query["plugin"], &query["required_api_version"]),
            (&json!(plugin), &json!("5.0"))
        );
        let texts = ["name", "description", "vendor", "copyright", "version"];
        assert!(texts.iter().all(|text| query[text].is_string()), "{query}");
        assert_eq!(query["required_cluster_stack"], json!([]));
        let (features, configuration) = match folder {
            DATAPATH => (json!([]), json!([])),
            _ => (json!(["THIN_PROVISIONING"]), json!(["coalesce", "format", "path"])),
        };
        let keys: Vec<_> = query["configuration"].as_object().unwrap().keys().collect();
        assert_eq!((&query["features"], json!(keys)), (&features, configuration));
        for entry in fs::read_dir(plugins().join(folder)).unwrap() {
            let mode = fs::metadata(entry.unwrap().path()).unwrap().permissions().mode();
            assert_eq!(mode & 0o111, 0o111);
        }
    }
    assert!(host.volume("Plugin.diagnostics", json!({})).unwrap().is_string());
}

#[test]
fn a_repository_is_made_attached_used_and_destroyed_as_xapi_does_it() {
    let host = Host::new();
    let configuration = json!({ "path": host.images() });
    let incomplete = host.volume("SR.probe", json!({ "configuration": {} })).unwrap();
    assert_eq!(incomplete[0]["complete"], json!(false));
    let empty = host.volume("SR.probe", json!({ "configuration": configuration })).unwrap();
    assert_eq!(
        empty,
        json!([{ "configuration": configuration, "complete": true, "extra_info": {} }])
    );
    let repository = host.repository();
    let uuid = sr_params(&configuration)["uuid"].clone();
    let probed = host.volume("SR.probe", json!({ "configuration": configuration })).unwrap();
    assert_eq!(
        (&probed[0]["configuration"]["sr_uuid"], &probed[0]["complete"]),
        (&uuid, &json!(true))
    );
    let stat = repository.call("SR.stat", json!({})).unwrap();
    assert_eq!((&stat["sr"], &probed[0]["sr"]["uuid"]), (&probed[0]["sr"]["sr"], &uuid));
    assert_eq!(
        (&stat["uuid"], &stat["name"], &stat["sr"]),
        (&uuid, &json!("disks"), &json!(repository.sr))
    );
    assert_eq!((&stat["health"], &stat["clustered"]), (&json!(["Healthy", ""]), &json!(false)));
    assert!(stat["free_space"].as_u64().unwrap() <= stat["total_space"].as_u64().unwrap());
    for (call, param) in [("SR.set_name", "new_name"), ("SR.set_description", "new_description")] {
        assert_eq!(repository.call(call, json!({ param: "other" })).unwrap(), Value::Null);
    }
    let stat = repository.call("SR.stat", json!({})).unwrap();
    assert_eq!((&stat["name"], &stat["description"]), (&json!("other"), &json!("other")));
    let volume = repository.try_create("web", 0).unwrap();
    let key = key(&volume);
    assert_eq!(repository.ls(), set([&key]));
    assert_eq!(host.volume("SR.detach", json!({ "sr": repository.sr })).unwrap(), Value::Null);
    assert_eq!(repository.call("SR.destroy", json!({})).unwrap(), Value::Null);
    assert_eq!((host.files(), host.images().join(".smapi").exists()), (BTreeSet::new(), false));
    assert_eq!(kind(repository.call("SR.ls", json!({}))), "SR_does_not_exist");
    assert_eq!(repository.call("SR.detach", json!({})).unwrap(), Value::Null);
}

/// A file system that is not mounted looks like a folder without volumes, and XAPI would forget all of them.
#[test]
fn a_folder_that_is_not_the_repository_is_not_attached() {
    let host = Host::new();
    let attach =
        |configuration: Value| host.volume("SR.attach", json!({ "configuration": configuration }));
    assert_eq!(kind(attach(json!({ "path": host.images() }))), "SR_does_not_exist");
    assert_eq!(kind(attach(json!({ "path": host.path("no") }))), "SR_does_not_exist");
    assert_eq!(kind(attach(json!({}))), "Invalid_parameters");
    let repository = host.repository();
    let other = json!({ "path": host.images(), "sr_uuid": "another" });
    assert_eq!(kind(attach(other)), "SR_does_not_exist");
    let mut params = sr_params(&json!({ "path": host.images() }));
    assert!(host.volume("SR.create", params.clone()).is_ok(), "the same again");
    params["uuid"] = json!("another");
    let (_, text) = host.volume("SR.create", params.clone()).unwrap_err();
    assert!(text.contains("000001 already"), "{text}");
    params["configuration"] = json!({ "path": host.images(), "format": "vmdk" });
    assert_eq!(kind(host.volume("SR.create", params)), "Invalid_parameters");
    assert!(repository.ls().is_empty());
    fs::rename(host.images(), host.path("unmounted")).unwrap();
    fs::create_dir(host.images()).unwrap();
    assert_eq!(kind(repository.call("SR.ls", json!({}))), "SR_does_not_exist");
}

#[test]
fn a_volume_has_what_xapi_gave_it() {
    let host = Host::new();
    let repository = host.repository();
    let made = repository.try_create("web ä", 3 * 1024 * 1024 - 5).unwrap();
    let key = key(&made);
    let path = host.images().canonicalize().unwrap().join(&key);
    let mut expected = json!({
        "key": key, "uuid": made["uuid"], "name": "web ä", "description": "the disk web ä",
        "read_write": true, "sharable": false, "virtual_size": 3 * MIB,
        "physical_utilisation": made["physical_utilisation"],
        "uri": [format!("ferrite://{}?format=vhd", path.display())], "keys": {}, "cbt_enabled": false,
    });
    assert_eq!(made, expected);
    let uuid = made["uuid"].as_str().unwrap();
    assert_eq!((uuid.len(), uuid.matches('-').count()), (36, 4));
    for (k, v) in [("vdi-type", "user"), ("_sm_config_a b", "x\ny"), ("vdi-type", "redolog")] {
        let params = json!({ "key": key, "k": k, "v": v });
        assert_eq!(repository.call("Volume.set", params).unwrap(), Value::Null);
    }
    for (call, param) in
        [("Volume.set_name", "new_name"), ("Volume.set_description", "new_description")]
    {
        let params = json!({ "key": key, param: "other" });
        assert_eq!(repository.call(call, params).unwrap(), Value::Null);
    }
    expected["keys"] = json!({ "vdi-type": "redolog", "_sm_config_a b": "x\ny" });
    (expected["name"], expected["description"]) = (json!("other"), json!("other"));
    assert_eq!(repository.stat(&key), expected);
    for _ in 0..2 {
        let params = json!({ "key": key, "k": "vdi-type" });
        assert_eq!(repository.call("Volume.unset", params).unwrap(), Value::Null);
    }
    expected["keys"] = json!({ "_sm_config_a b": "x\ny" });
    assert_eq!(repository.call("SR.ls", json!({})).unwrap(), json!([expected]));
    // Without a value it is no set, and must not be an unset.
    let incomplete = json!({ "key": key, "k": "_sm_config_a b" });
    assert_eq!(kind(repository.call("Volume.set", incomplete)), "Invalid_parameters");
    assert_eq!(repository.stat(&key), expected);
}

#[test]
fn calls_at_once_lose_nothing() {
    let host = Host::new();
    let repository = host.repository();
    let key = repository.create("web", MIB);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (host, sr, key) = (&host, &repository.sr, &key);
            scope.spawn(move || {
                for k in 0..8 {
                    let params =
                        json!({ "sr": sr, "key": key, "k": format!("{thread}.{k}"), "v": "" });
                    let mut command = host.command("ferrite");
                    command.args(["compat", "smapi-volume", "Volume.set", "--json"]);
                    answer(host.run(&mut command, &params.to_string())).unwrap();
                }
            });
        }
    });
    assert_eq!(repository.stat(&key)["keys"].as_object().unwrap().len(), 32);
}

#[test]
fn snapshots_and_clones_read_as_the_volume_did_and_what_stands_below_goes_with_the_last() {
    for format in ["vhd", "qcow2"] {
        let host = Host::new();
        let path = host.images();
        let repository =
            host.repository_of(&json!({ "path": path, "format": format, "coalesce": "false" }));
        let disk = repository.create("web", 4 * MIB);
        assert!(disk.ends_with(format), "{disk}");
        repository.call("Volume.set", json!({ "key": disk, "k": "a", "v": "b" })).unwrap();
        repository.write(&disk, 1);
        let snapshot = repository.on("Volume.snapshot", &disk).unwrap();
        let what = |volume: &Value| {
            (volume["name"].clone(), volume["read_write"].clone(), volume["keys"].clone())
        };
        assert_eq!(what(&snapshot), (json!("web"), json!(false), json!({})));
        let snapshot = key(&snapshot);
        repository.write(&disk, 2);
        let of_snapshot = repository.on("Volume.clone", &snapshot).unwrap();
        assert_eq!(what(&of_snapshot), (json!("web"), json!(true), json!({})));
        let of_snapshot = key(&of_snapshot);
        let of_disk = key(&repository.on("Volume.clone", &disk).unwrap());
        let images = host.files().iter().filter(|name| !name.starts_with(".smapi/")).count();
        // Two hidden images: one below disk, snapshot and its clone, one below disk and its clone.
        assert_eq!(images, 4 + 2);
        // Nothing was written since, as when a guest is started from a template: the chain does not grow.
        let again = key(&repository.on("Volume.clone", &disk).unwrap());
        let images = host.files().iter().filter(|name| !name.starts_with(".smapi/")).count();
        assert_eq!(images, 5 + 2);
        repository.write(&of_disk, 3);
        repository.write(&of_snapshot, 4);
        let all = [(&disk, 2), (&snapshot, 1), (&of_snapshot, 4), (&of_disk, 3), (&again, 2)];
        for (key, byte) in all {
            assert_eq!(repository.read(key), byte, "{key}");
            let checked = host.ferrite(&["image", "check", &repository.image(key)]);
            assert_eq!(checked.0, Some(0), "{checked:?}");
        }
        assert_eq!(repository.stat(&disk)["keys"], json!({ "a": "b" }));
        for (gone, left) in [(0, 6), (3, 5), (1, 4), (4, 2)] {
            repository.on("Volume.destroy", all[gone].0).unwrap();
            let images = host.files().iter().filter(|name| !name.starts_with(".smapi/")).count();
            assert_eq!(images, left, "after {gone}");
        }
        assert_eq!(repository.ls(), set([&of_snapshot]));
        assert_eq!(repository.read(&of_snapshot), 4);
        for _ in 0..2 {
            assert_eq!(repository.on("Volume.destroy", &of_snapshot).unwrap(), Value::Null);
        }
        assert_eq!(host.files(), set([".smapi/sr.json"]));
    }
}

#[test]
fn images_that_people_put_there_are_volumes_and_other_files_are_not() {
    let host = Host::new();
    let repository = host.repository();
    let made = host.images().join("by hand.qcow2");
    host.ferrite(&["image", "create", made.to_str().unwrap(), "5M"]);
    fs::write(host.images().join("notes.txt"), "mine").unwrap();
    fs::write(host.images().join("disk.img"), "raw").unwrap();
    fs::write(host.images().join(".hidden.vhd"), "no").unwrap();
    symlink("by hand.qcow2", host.images().join("link.qcow2")).unwrap();
    fs::create_dir(host.images().join("folder.vhd")).unwrap();
    let volumes = repository.call("SR.ls", json!({})).unwrap();
    let [volume] = volumes.as_array().unwrap().as_slice() else { panic!("{volumes}") };
    assert_eq!((&volume["name"], &volume["virtual_size"]), (&json!("by hand"), &json!(5 * MIB)));
    assert!(volume["uuid"].is_null());
    let uri = volume["uri"][0].as_str().unwrap();
    assert!(uri.ends_with("/by%20hand.qcow2?format=qcow2"), "{uri}");
    fs::write(host.path("secret.vhd"), "secret").unwrap();
    let outside = ["../secret.vhd", "folder.vhd/../../secret.vhd"];
    let none = ["link.qcow2", "disk.img", "folder.vhd", ".hidden.vhd", "", "no.vhd"];
    for key in outside.into_iter().chain(none) {
        for call in ["Volume.stat", "Volume.snapshot", "Volume.clone"] {
            assert_eq!(kind(repository.on(call, key)), "Volume_does_not_exist", "{call} {key}");
        }
    }
    for key in outside {
        assert_eq!(kind(repository.on("Volume.destroy", key)), "Volume_does_not_exist");
    }
    // These are no volumes, so there is nothing to destroy.
    repository.on("Volume.destroy", "link.qcow2").unwrap();
    assert!(host.path("secret.vhd").exists() && host.images().join("link.qcow2").is_symlink());
    repository.call("Volume.set", json!({ "key": "by hand.qcow2", "k": "a", "v": "b" })).unwrap();
    repository.on("Volume.destroy", "by hand.qcow2").unwrap();
    assert!(!made.exists() && host.images().join("disk.img").exists());
}

#[test]
fn an_image_that_cannot_be_read_is_still_a_volume_and_keeps_what_may_be_below_it() {
    let host = Host::new();
    let repository = host.repository();
    let disk = repository.create("web", 4 * MIB);
    let snapshot = key(&repository.on("Volume.snapshot", &disk).unwrap());
    let path = host.images().join(&disk);
    let whole = fs::read(&path).unwrap();
    fs::write(&path, "broken").unwrap();
    let stat = repository.stat(&disk);
    assert_eq!((&stat["name"], &stat["virtual_size"]), (&json!("web"), &json!(4 * MIB)));
    assert_eq!(stat["read_write"], json!(false));
    assert_eq!(repository.ls(), set([&disk, &snapshot]));
    repository.on("Volume.destroy", &snapshot).unwrap();
    assert_eq!(repository.ls(), set([&disk]));
    // Its parent is still there, so that the image can be restored.
    fs::write(&path, whole).unwrap();
    assert_eq!(repository.read(&disk), 0);
    fs::write(&path, "broken").unwrap();
    repository.on("Volume.destroy", &disk).unwrap();
    assert_eq!(host.files(), set([".smapi/sr.json"]));
}

#[test]
fn a_volume_grows_and_never_shrinks() {
    let host = Host::new();
    let repository = host.repository();
    let disk = repository.create("web", 4 * MIB);
    repository.write(&disk, 7);
    let snapshot = key(&repository.on("Volume.snapshot", &disk).unwrap());
    let resize = |key: &str, size: i64| {
        repository.call("Volume.resize", json!({ "key": key, "new_size": size }))
    };
    for (size, bytes) in [(4 << 20, 4), ((6 << 20) - 1, 6), ((6 << 20) - 1, 6), (6 << 20, 6)] {
        assert_eq!(resize(&disk, size).unwrap(), Value::Null);
        assert_eq!(repository.stat(&disk)["virtual_size"], json!(bytes * MIB));
    }
    assert_eq!(repository.read(&disk), 7);
    for (key, size) in [(&disk, 5 << 20), (&disk, 0), (&disk, -1), (&snapshot, 9 << 20)] {
        resize(key, size).unwrap_err();
    }
    assert_eq!(repository.stat(&disk)["virtual_size"], json!(6 * MIB));
    assert_eq!(repository.stat(&snapshot)["virtual_size"], json!(4 * MIB));
    assert_eq!(kind(resize("no.vhd", 9 << 20)), "Volume_does_not_exist");
}

#[test]
fn sizes_choose_the_format_and_what_is_no_size_is_refused() {
    let host = Host::new();
    let repository = host.repository();
    let largest = repository.create("large", 2040 << 30);
    let larger = repository.create("larger", (2040 << 30) + 1);
    assert!(largest.ends_with(".vhd") && larger.ends_with(".qcow2"), "{largest} {larger}");
    let bytes = repository.stat(&larger)["virtual_size"].clone();
    assert_eq!(bytes, json!((2040_u64 << 30) + MIB));
    for size in [-1, i64::MAX] {
        assert_eq!(kind(repository.try_create("no", size)), "Invalid_parameters");
    }
    let shared = json!({ "name": "a", "description": "", "size": 1, "sharable": true });
    assert_eq!(kind(repository.call("Volume.create", shared)), "Unimplemented");
    assert_eq!(repository.ls(), set([&largest, &larger]));
}

#[test]
fn a_volume_in_use_is_not_destroyed() {
    let host = Host::new();
    let repository = host.repository();
    let disk = repository.create("web", MIB);
    let held = File::open(host.images().join(&disk)).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let (_, text) = repository.on("Volume.destroy", &disk).unwrap_err();
    assert!(text.contains("it is in use") && text.contains("detach"), "{text}");
    repository.call("SR.destroy", json!({})).unwrap_err();
    repository.on("Volume.snapshot", &disk).unwrap_err();
    assert_eq!(repository.ls(), set([&disk]));
    drop(held);
    repository.on("Volume.destroy", &disk).unwrap();
    assert_eq!(host.files(), set([".smapi/sr.json"]));
}

/// Kills a call at the step of this number among the system calls of one name. The exit code, and a repository after it.
fn killed_at(
    host: &Host,
    repository: &Repository<'_>,
    call: &Value,
    at: (&str, u32),
) -> Option<i32> {
    let (syscall, step) = at;
    let mut command = host.command("strace");
    command.args(["-f", "-qq", "-o", "/dev/null", "-e"]).arg(format!("trace={syscall}"));
    command.arg("-e").arg(format!("inject={syscall}:signal=KILL:when={step}"));
    command.args(["ferrite", "compat", "smapi-volume", call["name"].as_str().unwrap()]);
    command.arg("--json").arg("--run-dir").arg(host.path("run/ferrite"));
    let mut params = call["params"].clone();
    params["sr"] = json!(repository.sr);
    host.run(&mut command, &params.to_string()).0
}

#[test]
fn a_call_that_is_killed_at_any_step_leaves_the_old_state_or_the_new_one() {
    let strace = Command::new("strace").arg("-V").output();
    if installed("strace", strace).is_none() {
        return;
    }
    let new = json!({ "name": "new", "description": "", "size": MIB, "sharable": false });
    std::thread::scope(|scope| {
        for (name, least) in [("Volume.snapshot", 6), ("Volume.destroy", 3)] {
            let new = &new;
            scope.spawn(move || {
                let host = Host::new();
                let repository = host.repository();
                let kept = repository.create("kept", MIB);
                repository.write(&kept, 5);
                let gone = repository.create("gone", MIB);
                let whole = host.path("whole");
                copy_folder(&host.images(), &whole);
                let mut params = new.clone();
                params["key"] = if name == "Volume.destroy" { json!(gone) } else { json!(kept) };
                let call = json!({ "name": name, "params": params });
                let mut killed = 0;
                for syscall in ["rename", "linkat", "unlink"] {
                    for step in 1.. {
                        fs::remove_dir_all(host.images()).unwrap();
                        copy_folder(&whole, &host.images());
                        let before = repository.ls();
                        let code = killed_at(&host, &repository, &call, (syscall, step));
                        let after = repository.ls();
                        let at = format!("{name}, killed at {syscall} {step}");
                        let changed = after.symmetric_difference(&before).count();
                        assert!(changed <= 1 && after.contains(&kept), "{at}: {after:?}");
                        // An image that is only made for another one, or is not complete, is no volume.
                        let names = repository.names();
                        assert!(names.is_subset(&set(["kept", "gone"])), "{at}: {names:?}");
                        assert_eq!(repository.read(&kept), 5, "{at}");
                        // The call is repeated, and removes the files of the killed one.
                        repository.call(name, params.clone()).unwrap();
                        for key in repository.ls() {
                            repository.on("Volume.destroy", &key).unwrap();
                        }
                        assert_eq!(host.files(), set([".smapi/sr.json"]), "{at}");
                        if code == Some(0) {
                            break;
                        }
                        killed += 1;
                    }
                }
                assert!(killed >= least, "{name}: {killed}");
            });
        }
    });
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let (from, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        match from.is_dir() {
            true => copy_folder(&from, &to),
            false => drop(fs::copy(from, to).unwrap()),
        }
    }
}

#[test]
fn what_xapi_never_sends_is_answered_by_an_error_in_its_form() {
    let host = Host::new();
    let repository = host.repository();
    let plain = |folder: &str, name: &str, input: &str| {
        let program = plugins().join(folder).join(name);
        answer(host.run(host.command(program.to_str().unwrap()).arg("--json"), input))
    };
    for input in ["", "{", "[]", "null", "{\"sr\": 1}", "\u{7f}"] {
        assert_eq!(kind(plain(VOLUME, "SR.ls", input)), "Invalid_parameters", "{input:?}");
        assert_eq!(kind(plain(DATAPATH, "Datapath.attach", input)), "Invalid_parameters");
    }
    for sr in ["", "file://", "nfs:///srv", "/srv", "file:///no/such/folder"] {
        assert_eq!(kind(host.volume("SR.ls", json!({ "sr": sr }))), "SR_does_not_exist", "{sr}");
    }
    for tool in ["smapi-volume", "smapi-datapath"] {
        for (args, expected) in [
            (&["Volume.compose"][..], "Unimplemented"),
            (&["Data.frobnicate", "--json"], "Unimplemented"),
            (&[], "Invalid_parameters"),
            (&["SR.ls", "--yaml"], "Invalid_parameters"),
        ] {
            let mut command = host.command("ferrite");
            command.args(["compat", tool]).args(args);
            assert_eq!(kind(answer(host.run(&mut command, "{}"))), expected, "{tool} {args:?}");
        }
    }
    assert!(repository.ls().is_empty());
}

/// With tracing on, XAPI runs `python3 -m observer PROGRAM`, which runs the file in its own process.
#[test]
fn a_plug_in_runs_below_the_observer_and_without_the_program_says_so() {
    let host = Host::new();
    let observer = "import runpy, sys\nsys.argv = sys.argv[1:]\n\
                    try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n\
                    except SystemExit as e:\n    sys.exit(e.code)\n";
    fs::write(host.path("observer.py"), observer).unwrap();
    let observed = |path: Option<&str>, name: &str, params: &Value| {
        let program = plugins().join(VOLUME).join(name);
        let mut command = host.command("/usr/bin/python3");
        command.args(["-m", "observer"]).arg(program).arg("--json").current_dir(host.dir.path());
        if let Some(path) = path {
            command.env("PATH", path);
        }
        answer(host.run(&mut command, &params.to_string()))
    };
    let params = sr_params(&json!({ "path": host.images() }));
    let made = observed(None, "SR.create", &params).unwrap();
    assert_eq!(made["sr_uuid"], params["uuid"]);
    let missing = observed(None, "SR.ls", &json!({ "sr": "file:///no" }));
    assert_eq!(kind(missing), "SR_does_not_exist");
    let (kind, text) = observed(Some("/nonexistent"), "SR.create", &params).unwrap_err();
    assert!(kind == "Ferrite_error" && text.contains("install it"), "{text}");
}

/// What needs no tap: nothing is attached, and no daemon runs.
#[test]
fn the_datapath_refuses_what_it_cannot_serve_and_never_fails_to_detach() {
    let host = Host::new();
    let image = host.images().join("a b.vhd");
    let uri = format!("ferrite://{}?format=vhd", image.display()).replace(' ', "%20");
    let on = |call: &str, uri: &str| host.datapath(call, json!({ "uri": uri, "domain": "3" }));
    assert_eq!(kind(on("Datapath.attach", &uri)), "Volume_does_not_exist");
    host.ferrite(&["image", "create", image.to_str().unwrap(), "1M"]);
    let (kind_of, text) = on("Datapath.attach", &uri).unwrap_err();
    assert!(kind_of == "Ferrite_error" && !text.is_empty(), "{kind_of}: {text}");
    assert_eq!(kind(on("Datapath.activate", &uri)), "Invalid_parameters");
    for call in ["Datapath.deactivate", "Datapath.detach", "Datapath.close"] {
        assert_eq!(on(call, &uri).unwrap(), Value::Null, "{call}");
    }
    for uri in ["", "ferrite://host/a.vhd", "nbd:///a", "ferrite:///a.vhd?format=vmdk"] {
        assert_eq!(kind(on("Datapath.attach", uri)), "Invalid_parameters", "{uri}");
        assert_eq!(on("Datapath.detach", uri).unwrap(), Value::Null, "{uri}");
    }
    let open = |persistent: bool| {
        host.datapath("Datapath.open", json!({ "uri": uri, "persistent": persistent }))
    };
    assert_eq!((open(true).unwrap(), kind(open(false))), (Value::Null, "Unimplemented".to_owned()));
    let left = fs::read_dir(host.path("run/ferrite/smapi")).unwrap();
    assert_eq!(left.count(), 0, "no file of a disk stays");
}

#[test]
fn the_calls_of_the_manual_work() {
    let host = Host::new();
    let repository = host.repository();
    let key = repository.create("web", MIB);
    let page = include_str!("../../../../docs/xapi.md");
    let (_, section) = page.split_once("### A folder as a repository").unwrap();
    let (_, blocks) = section.split_once("```sh\n").unwrap();
    let script = blocks.split("```").next().unwrap();
    let script = script.replace("/var/lib/xapi/storage-scripts", plugins().to_str().unwrap());
    let script = script.replace("/srv/disks", host.images().to_str().unwrap());
    let (code, text) = host.run(host.command("sh").args(["-e", "-c", &script]), "");
    assert_eq!(code, Some(0), "{text}");
    let answers: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [probed, listed] = answers.as_slice() else { panic!("{text}") };
    assert_eq!((&probed[0]["sr"]["name"], &listed[0]["key"]), (&json!("disks"), &json!(key)));
}

/// Reads the first byte of a disk, as domain 0 does by the answer of attach.
fn read_by(answer: &Value) -> u8 {
    let uri = answer["implementations"][1][1]["uri"].as_str().unwrap();
    let link = uri.split(':').nth(2).unwrap();
    let socket = fs::canonicalize(link).unwrap();
    let name = socket.file_name().unwrap().to_str().unwrap();
    let numbers = name.strip_prefix("nbd").unwrap().split('.');
    let numbers: Result<Vec<u32>, _> = numbers.map(str::parse).collect();
    assert_eq!(numbers.map(|numbers| numbers.len()), Ok(2), "{name}");
    let mut client = Client::over(UnixStream::connect(socket).unwrap());
    client.go(false);
    client.send(0, 0, 0, 512, &[]);
    client.reply().data[0]
}

#[test]
fn a_disk_is_served_between_activate_and_deactivate_of_its_last_domain() {
    let host = Host::new();
    let mut daemon = Daemon::start(&host);
    let repository = host.repository();
    let disk = repository.create("web ä", 4 * MIB);
    repository.write(&disk, 9);
    let uri = repository.stat(&disk)["uri"][0].clone();
    let on = |call: &str, domain: &str| {
        host.datapath(call, json!({ "uri": uri, "domain": domain })).unwrap()
    };
    let run_dir = host.path("run/ferrite");
    let list =
        || host.ferrite(&["compat", "tap-ctl", "list", "--run-dir", run_dir.to_str().unwrap()]).1;
    let answer = on("Datapath.attach", "3");
    assert_eq!(on("Datapath.attach", "3"), answer);
    assert_eq!(on("Datapath.attach", "u0-copy"), answer);
    for _ in 0..2 {
        on("Datapath.activate", "3");
        on("Datapath.activate", "u0-copy");
        assert_eq!(read_by(&answer), 9);
    }
    let image = repository.image(&disk);
    assert!(list().contains(&format!("state=0 args=vhd:{image}\n")), "{}", list());
    repository.on("Volume.destroy", &disk).unwrap_err();
    // The guest waits while its disk is snapshotted.
    let snapshot = key(&repository.on("Volume.snapshot", &disk).unwrap());
    assert_eq!((read_by(&answer), repository.read(&snapshot)), (9, 9));
    on("Datapath.deactivate", "3");
    on("Datapath.detach", "3");
    assert_eq!(read_by(&answer), 9);
    // The attached disk is known after the end of all programs.
    drop(daemon);
    daemon = Daemon::start(&host);
    assert_eq!(on("Datapath.attach", "u0-copy"), answer);
    for _ in 0..2 {
        on("Datapath.deactivate", "u0-copy");
        assert!(!list().contains("args="), "{}", list());
    }
    on("Datapath.activate", "u0-copy");
    assert_eq!(read_by(&answer), 9);
    for _ in 0..2 {
        on("Datapath.deactivate", "u0-copy");
    }
    for _ in 0..2 {
        on("Datapath.detach", "u0-copy");
    }
    assert_eq!(list(), "");
    assert_eq!(fs::read_dir(run_dir.join("smapi")).unwrap().count(), 0);
    drop(daemon);
}
