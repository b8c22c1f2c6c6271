//! The volume plug-in: a folder of VHD and qcow2 images as a storage repository.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ferrite_disk::Format;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::collect;
use super::taps::TapCtl;
use super::volume_folder::{Folder, Record, Repository, is_of_job, new_uuid};
use super::volume_images::{Images, new_key, room};
use super::{Call, Fault, Kind, Query, json as as_json};

/// The features that `xapi-storage-script` does not find by the names of the programs.
const FEATURES: &[&str] = &["THIN_PROVISIONING"];
/// Disks are multiples of this, as those of XAPI's own repositories.
const UNIT: u64 = 1 << 20;
/// The largest disk of a VHD. Larger ones are qcow2.
const MAX_VHD: u64 = 2040 << 30;
/// The keys of a repository's configuration.
const PATH: &str = "path";
const FORMAT: &str = "format";
const COALESCE: &str = "coalesce";
const SR_UUID: &str = "sr_uuid";

type Configuration = BTreeMap<String, String>;

#[derive(Deserialize)]
struct ConfigurationParams {
    configuration: Configuration,
}

#[derive(Deserialize)]
struct CreateRepository {
    uuid: String,
    configuration: Configuration,
    name: String,
    description: String,
}

#[derive(Deserialize)]
struct SrParams {
    sr: String,
}

#[derive(Deserialize)]
struct NewText {
    sr: String,
    /// Of a volume.
    key: Option<String>,
    #[serde(alias = "new_name", alias = "new_description")]
    text: String,
}

#[derive(Deserialize)]
struct CreateParams {
    sr: String,
    name: String,
    description: String,
    size: i64,
    sharable: bool,
}

#[derive(Deserialize)]
struct VolumeParams {
    sr: String,
    key: String,
}

#[derive(Deserialize)]
struct SetParams {
    sr: String,
    key: String,
    k: String,
    v: String,
}

#[derive(Deserialize)]
struct UnsetParams {
    sr: String,
    key: String,
    k: String,
}

#[derive(Deserialize)]
struct ResizeParams {
    sr: String,
    key: String,
    new_size: i64,
}

/// A repository, as `SR.stat` describes it.
#[derive(Serialize)]
struct SrStat {
    sr: String,
    name: String,
    uuid: String,
    description: String,
    free_space: u64,
    total_space: u64,
    datasources: [String; 0],
    clustered: bool,
    health: [&'static str; 2],
}

/// A volume, as `Volume.stat` describes it.
#[derive(Serialize)]
struct Volume {
    key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    uuid: Option<String>,
    name: String,
    description: String,
    read_write: bool,
    sharable: bool,
    virtual_size: u64,
    physical_utilisation: u64,
    uri: [String; 1],
    keys: BTreeMap<String, String>,
    cbt_enabled: bool,
}

/// Carries out a call.
pub(super) fn answer(call: &Call) -> Result<Value, Fault> {
    let plugin = Plugin { run_dir: &call.run_dir };
    match call.name.to_ascii_lowercase().as_str() {
        "plugin.query" => query(),
        "plugin.diagnostics" => as_json(format!("ferrite {}", env!("CARGO_PKG_VERSION"))),
        "sr.probe" => probe(&call.params()?),
        "sr.create" => create_repository(call.params()?),
        "sr.attach" => attach(&call.params()?, &call.run_dir),
        // Nothing is kept of an attached repository: it may even be gone.
        "sr.detach" => call.params::<SrParams>().map(|_| Value::Null),
        "sr.destroy" => plugin.destroy_repository(&call.params()?),
        "sr.stat" => as_json(stat_repository(&Folder::named(&call.params::<SrParams>()?.sr)?)?),
        "sr.set_name" => change_repository(call.params()?, |sr, text| sr.name = text),
        "sr.set_description" => change_repository(call.params()?, |sr, text| sr.description = text),
        "sr.ls" => plugin.ls(&call.params()?),
        "volume.create" => plugin.create(&call.params()?),
        "volume.clone" => plugin.copy(&call.params()?, Copied::Clone),
        "volume.snapshot" => plugin.copy(&call.params()?, Copied::Snapshot),
        "volume.destroy" => plugin.destroy(&call.params()?),
        "volume.stat" => plugin.stat(&call.params()?),
        "volume.resize" => plugin.resize(&call.params()?),
        "volume.set" => {
            let SetParams { sr, key, k, v } = call.params()?;
            plugin.change(&sr, &key, |record| drop(record.keys.insert(k, v)))
        }
        "volume.unset" => {
            let UnsetParams { sr, key, k } = call.params()?;
            plugin.change(&sr, &key, |record| drop(record.keys.remove(&k)))
        }
        "volume.set_name" => plugin.set_text(call.params()?, |record, text| record.name = text),
        "volume.set_description" => {
            plugin.set_text(call.params()?, |record, text| record.description = text)
        }
        _ => Err(call.unimplemented()),
    }
}

fn query() -> Result<Value, Fault> {
    let description = "A folder of VHD and qcow2 images, served by Ferrite";
    let mut query = Query::new("Ferrite folder", description);
    query.features = FEATURES;
    query.configuration = BTreeMap::from([
        (PATH, "The folder of the images"),
        (FORMAT, "The format of new volumes: vhd (the default) or qcow2"),
        (
            COALESCE,
            "Whether images that only one other needs are merged: true (the default) or false",
        ),
    ]);
    as_json(query)
}

/// The folder of a configuration.
fn path(configuration: &Configuration) -> Result<&Path, Fault> {
    configuration.get(PATH).map(Path::new).ok_or_else(|| {
        let help = "add the key path, with the folder of the images (device-config:path=FOLDER)";
        Fault::new(Kind::Invalid, format!("the configuration names no folder; {help}"))
    })
}

fn probe(params: &ConfigurationParams) -> Result<Value, Fault> {
    let configuration = &params.configuration;
    let Ok(path) = path(configuration) else {
        return Ok(
            json!([{ "configuration": configuration, "complete": false, "extra_info": {} }]),
        );
    };
    let Some(folder) = Folder::find(path)? else {
        return Ok(json!([{ "configuration": configuration, "complete": true, "extra_info": {} }]));
    };
    let mut found = configuration.clone();
    found.insert(SR_UUID.to_owned(), folder.repository.uuid.clone());
    let sr = stat_repository(&folder)?;
    Ok(json!([{ "configuration": found, "complete": true, "sr": sr, "extra_info": {} }]))
}

fn create_repository(params: CreateRepository) -> Result<Value, Fault> {
    let CreateRepository { uuid, mut configuration, name, description } = params;
    let format = configuration.get(FORMAT).map_or(Format::Vhd.name(), String::as_str).to_owned();
    if ![Format::Vhd, Format::Qcow2].iter().any(|known| known.name() == format) {
        let text = format!("new volumes cannot have the format {format}; choose vhd or qcow2");
        return Err(Fault::new(Kind::Invalid, text));
    }
    let no_coalesce = match configuration.get(COALESCE).map(String::as_str) {
        None | Some("true") => false,
        Some("false") => true,
        Some(other) => {
            let text = format!("coalesce cannot be {other}; choose true or false");
            return Err(Fault::new(Kind::Invalid, text));
        }
    };
    let repository = Repository { uuid: uuid.clone(), name, description, format, no_coalesce };
    Folder::create(path(&configuration)?, repository)?;
    configuration.insert(SR_UUID.to_owned(), uuid);
    as_json(configuration)
}

fn attach(params: &ConfigurationParams, run_dir: &Path) -> Result<Value, Fault> {
    let folder = Folder::at(path(&params.configuration)?)?;
    match params.configuration.get(SR_UUID) {
        Some(uuid) if *uuid != folder.repository.uuid => {
            let help = "check what is mounted there";
            let text = format!(
                "{} is the repository {}, not {uuid}; {help}",
                folder.path.display(),
                folder.repository.uuid
            );
            Err(Fault::new(Kind::SrDoesNotExist, text))
        }
        _ => {
            collect::begin(&folder, run_dir);
            as_json(folder.sr())
        }
    }
}

fn stat_repository(folder: &Folder) -> Result<SrStat, Fault> {
    let room = room(&folder.path);
    let (free_space, total_space) = room.map_err(|e| {
        Fault::of_io(format!("cannot tell the room of {}", folder.path.display()), e)
    })?;
    let Repository { uuid, name, description, .. } = folder.repository.clone();
    Ok(SrStat {
        sr: folder.sr(),
        name,
        uuid,
        description,
        free_space,
        total_space,
        datasources: [],
        clustered: false,
        health: ["Healthy", ""],
    })
}

fn change_repository(
    params: NewText,
    change: impl FnOnce(&mut Repository, String),
) -> Result<Value, Fault> {
    let folder = Folder::named(&params.sr)?;
    let _lock = folder.lock()?;
    // Read again, as another call may have changed it before this one had the lock.
    let mut folder = Folder::at(&folder.path)?;
    change(&mut folder.repository, params.text);
    folder.save()?;
    Ok(Value::Null)
}

/// The kind of a copy of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copied {
    Clone,
    Snapshot,
}

struct Plugin<'a> {
    run_dir: &'a PathBuf,
}

impl Plugin<'_> {
    /// Runs a step on the images of a repository.
    fn with<T>(
        &self,
        sr: &str,
        step: impl FnOnce(&Images<'_>, &Folder) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let folder = Folder::named(sr)?;
        let taps = TapCtl { run_dir: self.run_dir };
        step(&Images { folder: &folder, taps: &taps, run_dir: self.run_dir }, &folder)
    }

    /// Runs a step that changes something: one after the other.
    fn changing<T>(
        &self,
        sr: &str,
        step: impl FnOnce(&Images<'_>, &Folder) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        self.with(sr, |images, folder| {
            let _lock = folder.lock()?;
            step(images, folder)
        })
    }

    fn ls(&self, params: &SrParams) -> Result<Value, Fault> {
        self.with(&params.sr, |images, folder| {
            let mut volumes = Vec::new();
            for key in folder.keys()? {
                match record(folder, &key).and_then(|record| volume(images, &key, record)) {
                    // The volume was destroyed meanwhile, or is hidden.
                    Err(fault) if fault.kind == Kind::VolumeDoesNotExist => {}
                    described => volumes.push(described?),
                }
            }
            as_json(volumes)
        })
    }

    fn stat(&self, params: &VolumeParams) -> Result<Value, Fault> {
        self.with(&params.sr, |images, folder| {
            let record = record(folder, &params.key)?;
            as_json(volume(images, &params.key, record)?)
        })
    }

    fn create(&self, params: &CreateParams) -> Result<Value, Fault> {
        if params.sharable {
            let help = "use a repository of block devices for it";
            let text = format!("an image has one writer, so a volume cannot be shared; {help}");
            return Err(Fault::new(Kind::Unimplemented, text));
        }
        let bytes = rounded(params.size)?;
        self.changing(&params.sr, |images, folder| {
            let named = Format::by_name(&folder.repository.format);
            let format = match named {
                Some(Format::Vhd) | None if bytes <= MAX_VHD => Format::Vhd,
                _ => Format::Qcow2,
            };
            let key = new_key(format)?;
            let made = Record {
                uuid: Some(new_uuid()?),
                name: params.name.clone(),
                description: params.description.clone(),
                bytes,
                ..Record::default()
            };
            self.make(images, folder, &key, made, || images.create(&key, bytes))
        })
    }

    fn copy(&self, params: &VolumeParams, to: Copied) -> Result<Value, Fault> {
        self.changing(&params.sr, |images, folder| {
            let source = record(folder, &params.key)?;
            let format = folder.image(&params.key)?.format;
            let key = new_key(format)?;
            let made = Record {
                uuid: Some(new_uuid()?),
                name: source.name,
                description: source.description,
                bytes: source.bytes,
                read_only: to == Copied::Snapshot,
                made_of: Some(params.key.clone()),
                ..Record::default()
            };
            self.make(images, folder, &key, made, || {
                images.create_from(&params.key, &key)?;
                if to == Copied::Snapshot { images.protect(&key) } else { Ok(()) }
            })
        })
    }

    /// Makes a volume, in the order of `volume_folder`.
    fn make(
        &self,
        images: &Images<'_>,
        folder: &Folder,
        key: &str,
        record: Record,
        image: impl FnOnce() -> Result<(), Fault>,
    ) -> Result<Value, Fault> {
        folder.set_record(key, &Record::hidden())?;
        let made = image().and_then(|()| folder.set_record(key, &record));
        if made.is_err() {
            // The image is hidden. The next call removes it if this one cannot.
            let _ = images.sweep();
        }
        made.and_then(|()| as_json(volume(images, key, record)?))
    }

    /// A volume that is gone already is a success: XAPI destroys some twice.
    fn destroy(&self, params: &VolumeParams) -> Result<Value, Fault> {
        self.changing(&params.sr, |images, folder| {
            folder.image(&params.key)?;
            if folder.has(&params.key) {
                images.check_unused(&params.key)?;
                hide(folder, &params.key)?;
            }
            images.sweep()
        })?;
        // Not before the lock is free.
        self.with(&params.sr, |_, folder| {
            collect::begin(folder, self.run_dir);
            Ok(Value::Null)
        })
    }

    fn destroy_repository(&self, params: &SrParams) -> Result<Value, Fault> {
        self.changing(&params.sr, |images, folder| {
            let keys = folder.keys()?;
            keys.iter().try_for_each(|key| images.check_unused(key))?;
            keys.iter().try_for_each(|key| hide(folder, key))?;
            images.sweep()?;
            if let Some(key) = folder.keys()?.first() {
                let help = "images of other folders stand on it: ferrite image rebase moves them";
                let text = format!("{} cannot be removed: {help}", folder.path.join(key).display());
                return Err(Fault::new(Kind::Failed, text));
            }
            folder.forget().map(|()| Value::Null)
        })
    }

    fn resize(&self, params: &ResizeParams) -> Result<Value, Fault> {
        let bytes = rounded(params.new_size)?;
        self.changing(&params.sr, |images, folder| {
            let mut record = record(folder, &params.key)?;
            let refuse = |why: &str| {
                let text = format!("cannot resize the volume {}: {why}", params.key);
                Err(Fault::new(Kind::Failed, text))
            };
            if record.read_only {
                return refuse("it is a snapshot; resize a clone of it");
            }
            // A disk that was made by other means need not be a multiple of the unit.
            let now = images.info(&params.key)?.virtual_bytes;
            if bytes < now {
                return refuse(
                    "it would be smaller than it is; copy it to a smaller volume instead",
                );
            }
            let is_enough = i64::try_from(now).is_ok_and(|now| params.new_size <= now);
            if !is_enough {
                images.resize(&params.key, bytes)?;
            }
            record.bytes = if is_enough { now } else { bytes };
            folder.set_record(&params.key, &record).map(|()| Value::Null)
        })
    }

    fn set_text(
        &self,
        params: NewText,
        change: impl FnOnce(&mut Record, String),
    ) -> Result<Value, Fault> {
        let NewText { sr, key, text } = params;
        let key = key.ok_or_else(|| {
            Fault::new(Kind::Invalid, "no volume is named; give its key as the parameter key")
        })?;
        self.change(&sr, &key, |record| change(record, text))
    }

    fn change(
        &self,
        sr: &str,
        key: &str,
        change: impl FnOnce(&mut Record),
    ) -> Result<Value, Fault> {
        self.changing(sr, |_, folder| {
            let before = record(folder, key)?;
            let mut after = before.clone();
            change(&mut after);
            if after != before {
                folder.set_record(key, &after)?;
            }
            Ok(Value::Null)
        })
    }
}

/// The file of a volume; of an image that has none, what its name says.
fn record(folder: &Folder, key: &str) -> Result<Record, Fault> {
    folder.image(key)?;
    let record = folder.record(key)?;
    if !folder.has(key) || is_of_job(key) || record.as_ref().is_some_and(|record| record.hidden) {
        let text = format!("there is no volume {key} in {}; list them", folder.path.display());
        return Err(Fault::new(Kind::VolumeDoesNotExist, text));
    }
    Ok(record.unwrap_or_else(|| {
        let name = Path::new(key).file_stem().and_then(|name| name.to_str()).unwrap_or(key);
        Record { name: name.to_owned(), ..Record::default() }
    }))
}

/// Takes a volume away from XAPI, durably. The keys that it has set go with it.
fn hide(folder: &Folder, key: &str) -> Result<(), Fault> {
    folder.set_record(key, &Record::hidden())
}

/// A volume as XAPI sees it. An image that cannot be read is still one, or XAPI would forget it.
fn volume(images: &Images<'_>, key: &str, record: Record) -> Result<Volume, Fault> {
    let uri = images.folder.image(key)?.uri();
    let (virtual_size, physical_utilisation, is_protected) = match images.info(key) {
        Ok(info) => {
            let leaf = info.chain.first();
            let (used, protected) =
                leaf.map_or((0, false), |leaf| (leaf.disk_bytes, leaf.read_only));
            (info.virtual_bytes, used, protected)
        }
        Err(fault) if fault.kind == Kind::VolumeDoesNotExist => return Err(fault),
        Err(fault) => {
            eprintln!("{key}: {}", crate::plain::one_line(&fault.text));
            (record.bytes, 0, true)
        }
    };
    Ok(Volume {
        key: key.to_owned(),
        uuid: record.uuid,
        name: record.name,
        description: record.description,
        read_write: !record.read_only && !is_protected,
        sharable: false,
        virtual_size,
        physical_utilisation,
        uri: [uri],
        keys: record.keys,
        cbt_enabled: false,
    })
}

/// The size of a disk that has at least so many bytes.
fn rounded(bytes: i64) -> Result<u64, Fault> {
    let rounded =
        u64::try_from(bytes).ok().and_then(|bytes| bytes.max(1).checked_next_multiple_of(UNIT));
    rounded.filter(|bytes| i64::try_from(*bytes).is_ok()).ok_or_else(|| {
        Fault::new(Kind::Invalid, format!("{bytes} bytes are no size of a disk; give another one"))
    })
}
