//! A backend without rights, whose keeper opens files for it (threats.md T27 and T28). takeover.rs tests its takeover.

use std::process::Stdio;

use ferrite_host::directory::HostDirectory;
use ferrite_image_tools::NewImage;
use ferrite_loopback::CopyWith;
use ferrite_testkit::images;
use ferrite_testkit::processes::World;

/// Not a test: the backend, if this program was started again with that environment.
#[test]
fn process_backend() {
    ferrite_testkit::processes::be_a_backend(|_, _, _| {});
}

#[test]
fn a_parent_outside_the_folders_is_refused_and_the_way_to_allow_it_is_told() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [leaf, parent] = [(0, "leaf.qcow2"), (1, "parent.qcow2")]
        .map(|(dir, name)| images::name(&dirs[dir].path().join(name)));
    images::anywhere(&HostDirectory, |tools| {
        let new = NewImage { bytes: Some(1 << 20), ..NewImage::default() };
        tools.create(&parent, &new).unwrap();
        let new = NewImage { parent: Some(parent.clone()), ..NewImage::default() };
        tools.create(&leaf, &new).unwrap();
    });
    let world = World::new(CopyWith::Memcpy).sandboxed();
    world.serve_from(leaf.path.clone());
    let output = world.command(&[]).stderr(Stdio::piped()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(101), "{text}");
    assert!(text.contains(parent.path.to_str().unwrap()), "{text}");
    assert!(text.contains("parent_folders of /etc/ferrite/ferrite.toml"), "{text}");
}
