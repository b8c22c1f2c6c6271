//! The schema in the documentation describes the types of this program, and no others.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::methods::METHODS;
use super::protocol::*;
use crate::params::Format;
use crate::pause::Pause;
use crate::state::DiskId;
use ferrite_serve::path::full::OnFull;
use ferrite_serve::path::limit::Limits;
use ferrite_serve::polling::PollWindow;

fn schema() -> Value {
    serde_json::from_str(include_str!("../../../../docs/control.schema.json")).unwrap()
}

/// Checks a value against a part of the schema. The error names the part that differs.
fn check(all: &Value, part: &Value, value: &Value, at: &str) -> Result<(), String> {
    let wrong = |what: &str| Err(format!("{at}: {what}: {value}"));
    if let Some(name) = part["$ref"].as_str() {
        let definition = &all["$defs"][name.strip_prefix("#/$defs/").unwrap()];
        assert!(definition.is_object(), "{name} is not defined");
        return check(all, definition, value, at);
    }
    if part.get("const").is_some_and(|only| only != value) {
        return wrong("not what it has to be");
    }
    if part["enum"].as_array().is_some_and(|words| !words.contains(value)) {
        return wrong("no word of these");
    }
    let types: Vec<&str> = match &part["type"] {
        Value::String(one) => vec![one],
        Value::Array(several) => several.iter().map(|t| t.as_str().unwrap()).collect(),
        _ => vec![],
    };
    let is = |of: &&str| match *of {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "null" => value.is_null(),
        other => panic!("{other} is not known"),
    };
    if !types.is_empty() && !types.iter().any(is) {
        return wrong("another type");
    }
    if let (Some(number), Some(most)) = (value.as_u64(), part["maximum"].as_u64())
        && number > most
    {
        return wrong("too large");
    }
    if let Some(several) = part["oneOf"].as_array() {
        let is_one = |part: &&Value| check(all, part, value, at).is_ok();
        return if several.iter().any(|part| is_one(&part)) {
            Ok(())
        } else {
            wrong("none of these")
        };
    }
    if let Some(items) = value.as_array() {
        items.iter().try_for_each(|item| check(all, &part["items"], item, at))?;
    }
    let (Some(fields), Some(known)) = (value.as_object(), part["properties"].as_object()) else {
        return Ok(());
    };
    assert_eq!(part["additionalProperties"], false, "{at}");
    for name in part["required"].as_array().unwrap() {
        if !fields.contains_key(name.as_str().unwrap()) {
            return wrong(&format!("{name} is missing"));
        }
    }
    for (name, value) in fields {
        let Some(part) = known.get(name) else { return wrong(&format!("{name} is not known")) };
        check(all, part, value, &format!("{at}.{name}"))?;
    }
    Ok(())
}

/// Checks a type: its fullest value has exactly the fields of the schema. Without any required
/// field, both the schema and the type refuse it.
fn same<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(name: &str, full: &T) {
    let all = schema();
    let definition = &all["$defs"][name];
    let value = serde_json::to_value(full).unwrap();
    check(&all, definition, &value, name).unwrap();
    let fields = value.as_object().unwrap();
    let known = definition["properties"].as_object().unwrap();
    let names = |map: &Map<String, Value>| map.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(fields), names(known), "{name}");
    assert_eq!(&serde_json::from_value::<T>(value.clone()).unwrap(), full);
    for field in known.keys() {
        let mut without = fields.clone();
        without.remove(field);
        let without = Value::Object(without);
        let taken = serde_json::from_value::<T>(without.clone()).is_ok();
        let allowed = check(&all, definition, &without, name).is_ok();
        assert_eq!(taken, allowed, "{name} without {field}");
    }
    let mut more = fields.clone();
    more.insert("colour".to_owned(), json!(1));
    assert!(serde_json::from_value::<T>(Value::Object(more)).is_err(), "{name}");
}

const FULL: Full = Full { requests: 1 << 40, since: 1 << 41 };

const HANGS: Hangs = Hangs { requests: 1 << 40, since: 1 << 41 };

fn pause() -> Pause {
    Pause { since: 1 << 41, by: "a".to_owned(), is_step: true, refused: None }
}

fn disk() -> Disk {
    Disk {
        disk: DiskId { domid: u16::MAX, devid: u32::MAX },
        phase: PhaseName::Failed,
        since: 1 << 40,
        format: Some(Format::Qcow2),
        image: Some("/srv/a".to_owned()),
        pid: Some(u32::MAX),
        minor: 3,
        starts: 2,
        full: Some(FULL),
        hangs: Some(HANGS),
        weak: true,
        paused: Some(pause()),
        guest: Some(DiskId { domid: 1, devid: 2 }),
        why: Some("no".to_owned()),
        help: Some("yes".to_owned()),
    }
}

#[test]
fn every_type_is_described_as_it_is() {
    let id = DiskId { domid: 1, devid: 51712 };
    same("DiskId", &id);
    same("Nothing", &Nothing {});
    same("ShowParams", &ShowParams { disk: id });
    same("DetachParams", &DetachParams { disk: id, force: true, timeout_s: 5 });
    same("WaitParams", &WaitParams { backend: "backend/vbd3/1/2".to_owned(), timeout_s: 5 });
    same("Full", &FULL);
    same("Hangs", &HANGS);
    same("Pause", &pause());
    same("PauseParams", &PauseParams { disk: id, by: "a".to_owned(), timeout_s: 5 });
    let image = Some("raw:/a".to_owned());
    same(
        "SnapshotParams",
        &SnapshotParams {
            disk: id,
            name: "/a".to_owned(),
            leaf: Some(Format::Qcow2),
            begin_map: Some("nightly".to_owned()),
        },
    );
    let map = "nightly".to_owned();
    same("DirtyParams", &DirtyParams { disk: id, verb: MapVerb::Clear, map });
    same("ResizeParams", &ResizeParams { disk: id, bytes: 1 << 40, is_more: true });
    let (to, compare) = ("raw:/a".to_owned(), true);
    same("SwitchParams", &SwitchParams { disk: id, image: to, compare });
    same("ResumeParams", &ResumeParams { disk: id, image, timeout_s: 5 });
    same("Disk", &disk());
    same("Disks", &Disks { disks: vec![disk()], no_xen: Some("none".to_owned()) });
    let (backend_state, frontend_state, online) = (4, 4, true);
    let (hotplug_status, waits_for) = (Some("connected".to_owned()), Some("it".to_owned()));
    let (key, value) = ("on_full".to_owned(), "wait".to_owned());
    let setting = Setting { key, value, from: Source::Image };
    same("Setting", &setting);
    let limits = "iops=1:2,iops_read=3:4,iops_write=5:6,bytes=65536:7,bytes_read=65536:8,\
                  bytes_write=1048576:9";
    let limits: Limits = limits.parse().unwrap();
    same("Rate", &limits.iops.unwrap());
    same("Limits", &limits);
    same("LimitParams", &LimitParams { disk: id, limits });
    same("Limited", &Limited { disk: id, limits });
    let (on_full, poll_us) = (Some(OnFull::Wait), Some(PollWindow::Fixed(7)));
    same("SetParams", &SetParams { disk: id, on_full, poll_us, cpu: Some(6400) });
    same("SetDone", &SetDone { disk: id, settings: vec![setting.clone()] });
    let disk = disk();
    same(
        "Details",
        &Details {
            disk: disk.clone(),
            backend_state,
            frontend_state,
            online,
            read_only: true,
            settings: vec![setting.clone()],
            nbd: Some("/run/ferrite/vbd-1-51712/nbd".to_owned()),
            hotplug_status,
            waits_for,
        },
    );
    let upgrade = UpgradeParams { binary: "/usr/bin/ferrite".to_owned(), disk: Some(id) };
    same("UpgradeParams", &upgrade);
    let (why, help) = ("no".to_owned(), "yes".to_owned());
    let not = NotUpgraded { disk: id, why, help };
    same("NotUpgraded", &not);
    same("Upgraded", &Upgraded { upgraded: vec![id], failed: vec![not] });
    same("Detached", &Detached { disk: id, forced: false });
    same("Attached", &Attached { disk });
    let (version, no_xen) = ("1".to_owned(), Some("none".to_owned()));
    let (pid, started, xen, served, failed, disks) = (1, 2, false, 3, 4, 7);
    same("Status", &Status { version, pid, started, xen, no_xen, served, failed, disks });
    let data = Some(Help { help: "yes".to_owned(), errno: Some(2) });
    same("Error", &RpcError { code: code::FAILED, message: "no".to_owned(), data });
}

#[test]
fn every_type_of_a_tap_is_described_as_it_is() {
    let (image, args) = (Some("vhd:/a".to_owned()), Some("vhd:/a".to_owned()));
    let (pid, minor, timeout_s) = (7, 8, 9);
    let (log, mirror) = (Some("/log".into()), Some("nbd:a".to_owned()));
    let (read_only, force) = (true, true);
    let params = TapParams { pid, minor, image, read_only, log, mirror, force, timeout_s };
    same("TapParams", &params);
    same("MinorParams", &MinorParams { minor });
    let (pid, minor) = (Some(pid), Some(minor));
    same("TapDone", &TapDone { pid, minor });
    let row = TapRow { pid, minor, state: Some(0x22a), args: args.clone(), worker: Some(3) };
    same("TapRow", &row);
    same("TapRows", &TapRows { taps: vec![row], disks: Some(Vec::new()) });
    let (sectors, errors, in_flight) = ([1, 1 << 40], [2, 3], 4);
    let (is_paused, mirror_failed) = (true, true);
    let image = TapImage { args: "vhd:/p".to_owned(), read_sectors: 1 << 40 };
    same("TapImage", &image);
    let chain = vec![image];
    let seen = TapStatistics { args, is_paused, sectors, errors, in_flight, mirror_failed, chain };
    same("TapStatistics", &seen);
}

#[test]
fn every_type_of_a_device_is_described_as_it_is() {
    let disk = DiskId { domid: 1, devid: 51712 };
    let (image, device) = (Some("vhd:/a".to_owned()), "/dev/nbd0".to_owned());
    let (read_only, shared, connections, by) = (true, true, 4, DeviceKind::Ublk);
    let asked = AddDeviceParams {
        disk: Some(disk),
        image: image.clone(),
        read_only,
        shared,
        connections,
        by: Some(by),
    };
    same("AddDeviceParams", &asked);
    same("RemoveDeviceParams", &RemoveDeviceParams { device: device.clone() });
    let (bytes, users) = (1 << 40, vec!["mounted at /mnt".to_owned()]);
    let row =
        DeviceRow { device: device.clone(), disk, image, bytes, read_only, connections, by, users };
    same("DeviceRow", &row);
    same("DeviceRows", &DeviceRows { devices: vec![row] });
    same("CleanedDevices", &CleanedDevices { removed: vec![device] });
}

#[test]
fn every_type_of_an_export_is_described_as_it_is() {
    let disk = DiskId { domid: 1, devid: 51712 };
    let (listen, tls) = (vec!["192.0.2.5:10809".to_owned()], Some("/etc/ferrite/tls".to_owned()));
    let (any_client, plain, read_only, shared, no_list) = (true, true, true, true, true);
    let (name, pid, why) = ("disk".to_owned(), Some(7), Some("no".to_owned()));
    let vhost_user = Some("/run/disk.sock".to_owned());
    let asked = ExportParams {
        disk,
        listen: listen.clone(),
        vhost_user: vhost_user.clone(),
        queues: Some(7),
        tls: tls.clone(),
        any_client,
        plain,
        name: Some(name.clone()),
        read_only,
        shared,
        no_list,
    };
    same("ExportParams", &asked);
    same("UnexportParams", &UnexportParams { disk });
    let row =
        ExportRow { disk, name, listen, vhost_user, tls, any_client, read_only, no_list, pid, why };
    same("ExportRow", &row);
    same("ExportRows", &ExportRows { exports: vec![row] });
}

#[test]
fn every_type_of_a_job_is_described_as_it_is() {
    let disk = DiskId { domid: 1, devid: 51712 };
    let path = |name: &str| Some(format!("/srv/{name}"));
    let (from, to, speed) = (path("b"), path("c"), Some(1 << 40));
    let force = true;
    let asked = CoalesceParams { disk, from: from.clone(), to: to.clone(), force, speed };
    same("CoalesceParams", &asked);
    let target = "raw:/srv/b".to_owned();
    let (switch, resume, compare) = (true, true, true);
    same("MirrorParams", &MirrorParams { disk, target, switch, resume, compare, speed });
    same("JobParams", &JobParams { id: 1 << 40 });
    same("JobWaitParams", &JobWaitParams { id: 7, timeout_s: 9 });
    same("JobLimitParams", &JobLimitParams { id: 7, speed });
    let job = Job {
        id: 1 << 40,
        kind: JobKind::Coalesce,
        disk,
        image: "/srv/a".to_owned(),
        from,
        to,
        phase: JobPhase::Failed,
        step: "copy".to_owned(),
        created: 1 << 40,
        ended: Some(1 << 41),
        done: 5,
        all: 1 << 60,
        rate: 2,
        left_s: Some(3),
        speed,
        why: Some("no".to_owned()),
        help: Some("yes".to_owned()),
    };
    same("Job", &job);
    same("JobList", &JobList { jobs: vec![job] });
}

#[test]
fn every_type_of_a_migration_is_described_as_it_is() {
    let disk = DiskId { domid: 1, devid: 51712 };
    let text = || "0a".to_owned();
    let (id, host, name, base) = (text(), text(), Some(text()), Some(text()));
    same("MigratePrepareParams", &MigratePrepareParams { disk, host, name, base, chain: true });
    same("MigrateRunParams", &MigrateRunParams { disk, speed: Some(1 << 40) });
    same("MigrateCommitParams", &MigrateCommitParams { disk, keep: true });
    same("MigrationParams", &MigrationParams { id: id.clone() });
    same("MigrateResolveParams", &MigrateResolveParams { id: id.clone(), here: false });
    let migration = Migration {
        id,
        direction: MigrationDirection::Out,
        disk: Some(disk),
        image: "/srv/a".to_owned(),
        host: Some(text()),
        target: Some(text()),
        holder: Holder::Doubt,
        over: true,
        job: Some(1 << 40),
        created: 1 << 40,
        why: Some(text()),
        help: Some(text()),
    };
    same("Migration", &migration);
    same("MigrationList", &MigrationList { migrations: vec![migration] });
}

#[test]
fn every_type_of_an_image_in_use_is_described_as_it_is() {
    let (uuid, relative) = ("0".repeat(32), "./a.vhd".to_owned());
    let parent = Change::Parent { uuid, modified: 1 << 40, relative };
    let key = Change::Key { nonce: "0".repeat(64), hash: "1".repeat(64) };
    let path = || "/srv/a".to_owned();
    for change in [parent, Change::Hidden(u8::MAX), key, Change::Size(1 << 40)] {
        same("ChangeImageParams", &ChangeImageParams { path: path(), change });
    }
    let parent = Some("/srv/b".to_owned());
    let facts = Facts { bytes: 1 << 40, end: 7, blocks: Some(u32::MAX), hidden: 1, parent };
    same("HeaderFacts", &facts);
    let refused = Unchanged { errno: 22, why: "no".to_owned() };
    same("Unchanged", &refused);
    let (facts, refused) = (Some(facts), Some(refused));
    same("ImageAnswer", &ImageAnswer { facts: facts.clone(), refused: refused.clone() });
    same("QueryImagesParams", &QueryImagesParams { paths: vec![path()] });
    let image = ImageFacts { path: path(), facts, refused };
    same("ImageFacts", &image);
    same("Images", &Images { images: vec![image] });
}

#[test]
fn every_word_of_the_schema_is_one_of_ours() {
    let all = schema();
    for word in all["$defs"]["JobKind"]["enum"].as_array().unwrap() {
        serde_json::from_value::<JobKind>(word.clone()).unwrap();
    }
    for word in all["$defs"]["Holder"]["enum"].as_array().unwrap() {
        serde_json::from_value::<Holder>(word.clone()).unwrap();
    }
    for word in all["$defs"]["MigrationDirection"]["enum"].as_array().unwrap() {
        serde_json::from_value::<MigrationDirection>(word.clone()).unwrap();
    }
    for word in all["$defs"]["JobPhase"]["enum"].as_array().unwrap() {
        serde_json::from_value::<JobPhase>(word.clone()).unwrap();
    }
    for word in all["$defs"]["Format"]["enum"].as_array().unwrap() {
        serde_json::from_value::<Format>(word.clone()).unwrap();
    }
    for word in all["$defs"]["Phase"]["enum"].as_array().unwrap() {
        serde_json::from_value::<PhaseName>(word.clone()).unwrap();
    }
    for word in all["$defs"]["Setting"]["properties"]["from"]["enum"].as_array().unwrap() {
        serde_json::from_value::<Source>(word.clone()).unwrap();
    }
    let methods = all["oneOf"].as_array().unwrap().iter();
    let methods: Vec<&str> =
        methods.map(|of| of["properties"]["method"]["const"].as_str().unwrap()).collect();
    assert_eq!(methods, METHODS);
    let text = all["description"].as_str().unwrap();
    assert!(text.contains(&MAX_LINE.to_string()));
}

#[test]
fn responses_are_as_the_schema_says() {
    let all = schema();
    let response = &all["$defs"]["Response"];
    for id in [json!(1), json!("a"), Value::Null] {
        let jsonrpc = VERSION.to_owned();
        let good = Response { jsonrpc, result: Some(json!({})), error: None, id };
        check(&all, response, &serde_json::to_value(good).unwrap(), "response").unwrap();
    }
    let foreign = json!({ "jsonrpc": "1.0", "result": 1, "id": 1 });
    assert!(check(&all, response, &foreign, "response").is_err());
}
