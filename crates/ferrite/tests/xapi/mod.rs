//! A host with XAPI's plug-ins, and `xapi-storage-script` in the place of XAPI.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

use ferrite_testkit::{is_night, wait_until};
use serde_json::{Value, json};

pub(crate) const VOLUME: &str = "volume/org.xen.xapi.storage.ferrite";
pub(crate) const DATAPATH: &str = "datapath/ferrite";
pub(crate) const MIB: u64 = 1 << 20;

/// A host with the package's programs, a run directory and a folder for images.
pub(crate) struct Host {
    pub(crate) dir: tempfile::TempDir,
}

/// The error of a call: its kind and text.
pub(crate) type Fault = (String, String);

impl Host {
    pub(crate) fn new() -> Host {
        // Most of the time is that of syncs, elsewhere.
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        for folder in ["bin", "run/ferrite", "images"] {
            fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        symlink(env!("CARGO_BIN_EXE_ferrite"), dir.path().join("bin/ferrite")).unwrap();
        Host { dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.path("images")
    }

    /// A program in the environment of the host.
    pub(crate) fn command(&self, program: &str) -> Command {
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap());
        let mut command = Command::new(program);
        command.env("PATH", path).env_remove("RUST_LOG").stdin(Stdio::piped());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs a command with this input: its exit code, and what it printed.
    pub(crate) fn run(&self, command: &mut Command, input: &str) -> (Option<i32>, String) {
        let mut child = command.spawn().unwrap();
        // A program that fails early need not read it.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let output = child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    }

    /// Calls a plug-in: the result, or the error. Python takes several times as long as the program that it
    /// runs. So with each commit only the first call of each plug-in is by its file, and the others run that program.
    pub(crate) fn call(&self, folder: &str, name: &str, params: &Value) -> Result<Value, Fault> {
        static CALLED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
        let program = plugins().join(folder).join(name);
        let is_first = CALLED.lock().unwrap().insert(program.clone());
        let mut command = match is_first || is_night() {
            true => self.command(program.to_str().unwrap()),
            false => self.command("ferrite"),
        };
        if !is_first && !is_night() {
            let kind = folder.split('/').next().unwrap();
            command.args(["compat", &format!("smapi-{kind}"), name]);
        }
        command.arg("--json").arg("--run-dir").arg(self.path("run/ferrite"));
        answer(self.run(&mut command, &params.to_string()))
    }

    pub(crate) fn volume(&self, name: &str, mut params: Value) -> Result<Value, Fault> {
        params["dbg"] = json!("test");
        self.call(VOLUME, name, &params)
    }

    pub(crate) fn datapath(&self, name: &str, mut params: Value) -> Result<Value, Fault> {
        params["dbg"] = json!("test");
        self.call(DATAPATH, name, &params)
    }

    pub(crate) fn ferrite(&self, args: &[&str]) -> (Option<i32>, String) {
        self.run(self.command("ferrite").args(args), "")
    }

    /// Makes a repository of the folder for images, and attaches it. Its images are merged only on request.
    pub(crate) fn repository(&self) -> Repository<'_> {
        self.repository_of(&json!({ "path": self.images(), "coalesce": "false" }))
    }

    /// Makes a repository by this configuration, and attaches it.
    pub(crate) fn repository_of(&self, configuration: &Value) -> Repository<'_> {
        let made = self.volume("SR.create", sr_params(configuration)).unwrap();
        let sr = self.volume("SR.attach", json!({ "configuration": made })).unwrap();
        Repository { host: self, sr: sr.as_str().unwrap().to_owned() }
    }

    /// The files of the folder for images, with those that the plug-in keeps.
    pub(crate) fn files(&self) -> BTreeSet<String> {
        let of = |folder: PathBuf, before: &str| -> Vec<String> {
            let entries = fs::read_dir(folder).into_iter().flatten();
            entries
                .map(|entry| format!("{before}{}", entry.unwrap().file_name().display()))
                .collect()
        };
        let all = [of(self.images(), ""), of(self.images().join(".smapi"), ".smapi/")].concat();
        all.into_iter()
            .filter(|name| name != ".smapi" && !name.starts_with(".smapi/lock"))
            .collect()
    }
}

/// What a plug-in has answered.
pub(crate) fn answer((code, text): (Option<i32>, String)) -> Result<Value, Fault> {
    let mut answer: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
    if code == Some(0) {
        return Ok(answer);
    }
    assert_eq!((code, &answer["code"]), (Some(1), &json!("SR_BACKEND_FAILURE")), "{answer}");
    let told = answer["params"].take();
    let [Value::String(kind), Value::String(text)] = told.as_array().unwrap().as_slice() else {
        panic!("{told}");
    };
    let backtrace = json!({ "error": text, "files": [], "lines": [] });
    assert_eq!(answer["backtrace"], backtrace, "{answer}");
    Err((kind.clone(), text.clone()))
}

pub(crate) fn sr_params(configuration: &Value) -> Value {
    json!({
        "uuid": "8d4b5c62-9c1e-4f0e-a2c5-000000000001", "configuration": configuration,
        "name": "disks", "description": "all disks",
    })
}

pub(crate) fn plugins() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/xapi")
}

/// The kind of an error.
#[track_caller]
pub(crate) fn kind(done: Result<Value, Fault>) -> String {
    done.unwrap_err().0
}

/// An attached repository.
pub(crate) struct Repository<'a> {
    pub(crate) host: &'a Host,
    pub(crate) sr: String,
}

impl Repository<'_> {
    pub(crate) fn call(&self, name: &str, mut params: Value) -> Result<Value, Fault> {
        params["sr"] = json!(self.sr);
        self.host.volume(name, params)
    }

    pub(crate) fn on(&self, name: &str, key: &str) -> Result<Value, Fault> {
        self.call(name, json!({ "key": key }))
    }

    pub(crate) fn try_create(&self, name: &str, size: i64) -> Result<Value, Fault> {
        let text = format!("the disk {name}");
        self.call(
            "Volume.create",
            json!({ "name": name, "description": text, "size": size, "sharable": false }),
        )
    }

    pub(crate) fn create(&self, name: &str, size: u64) -> String {
        key(&self.try_create(name, size.try_into().unwrap()).unwrap())
    }

    pub(crate) fn stat(&self, key: &str) -> Value {
        self.on("Volume.stat", key).unwrap()
    }

    /// The keys of all volumes.
    pub(crate) fn ls(&self) -> BTreeSet<String> {
        let volumes = self.call("SR.ls", json!({})).unwrap();
        volumes.as_array().unwrap().iter().map(key).collect()
    }

    /// The names of all volumes.
    pub(crate) fn names(&self) -> BTreeSet<String> {
        let volumes = self.call("SR.ls", json!({})).unwrap();
        let names = volumes.as_array().unwrap().iter();
        names.map(|volume| volume["name"].as_str().unwrap().to_owned()).collect()
    }

    /// The image of a volume, by its URI.
    pub(crate) fn image(&self, key: &str) -> String {
        let uri = self.stat(key)["uri"][0].as_str().unwrap().to_owned();
        let path = uri.strip_prefix("ferrite://").unwrap().split('?').next().unwrap();
        path.to_owned()
    }

    /// Fills the first bytes of a volume, as a guest would.
    pub(crate) fn write(&self, key: &str, byte: u8) {
        let data = self.host.path("data.img");
        let bytes = self.stat(key)["virtual_size"].as_u64().unwrap();
        let mut file = File::create(&data).unwrap();
        file.write_all(&[byte; 4096]).unwrap();
        file.set_len(bytes).unwrap();
        let image = self.image(key);
        let done = self.host.ferrite(&["image", "convert", "-n", data.to_str().unwrap(), &image]);
        assert_eq!(done.0, Some(0), "{done:?}");
    }

    /// The first byte of a volume.
    pub(crate) fn read(&self, key: &str) -> u8 {
        let copy = self.host.path("copy.img");
        let (image, to) = (self.image(key), copy.to_str().unwrap());
        let done = self.host.ferrite(&["image", "convert", "--force", &image, to]);
        assert_eq!(done.0, Some(0), "{done:?}");
        fs::read(copy).unwrap()[0]
    }
}

pub(crate) fn key(volume: &Value) -> String {
    volume["key"].as_str().unwrap().to_owned()
}

pub(crate) fn set<const N: usize>(keys: [&str; N]) -> BTreeSet<String> {
    keys.iter().map(|key| (*key).to_owned()).collect()
}

/// A daemon, without Xen, which ends with the test.
pub(crate) struct Daemon(Child);

impl Daemon {
    pub(crate) fn start(host: &Host) -> Daemon {
        let config = host.path("ferrite.toml");
        fs::write(&config, format!("image_folders = [{:?}]\n", host.images())).unwrap();
        let run_dir = host.path("run/ferrite");
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(["daemon", "--run-dir"]).arg(&run_dir).arg("--config").arg(config);
        command.stdout(Stdio::null()).stderr(File::create(host.path("log")).unwrap());
        let daemon = Daemon(command.env_remove("RUST_LOG").spawn().unwrap());
        let list = ["disk", "list", "--run-dir", run_dir.to_str().unwrap()];
        wait_until("an answer of the daemon", || !host.ferrite(&list).1.is_empty());
        daemon
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
