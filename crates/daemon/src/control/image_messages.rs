//! The messages about images that are in use.

pub use ferrite_serve::blkif::lifecycle::{Change, Facts};
use serde::{Deserialize, Serialize};

/// The parameters of `image.change`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChangeImageParams {
    /// The image's absolute path.
    pub path: String,
    /// The change of its headers.
    pub change: Change,
}

/// The result of `image.change`. Neither: no disk writes to the image now, and nothing was changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageAnswer {
    /// What its headers and table say after the change.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub facts: Option<Facts>,
    /// Why this image cannot have that.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub refused: Option<Unchanged>,
}

/// Why an image's headers were not changed or read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unchanged {
    /// The reason for programs, one of Linux's numbers.
    pub errno: i32,
    /// The reason for people.
    pub why: String,
}

/// The parameters of `image.query`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueryImagesParams {
    /// The images' absolute paths.
    pub paths: Vec<String>,
}

/// The result of `image.query`: the facts of each named image that a disk writes to now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Images {
    /// The images, in the order of the parameters.
    pub images: Vec<ImageFacts>,
}

/// An image in `image.query`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageFacts {
    /// Its path, as in the parameters.
    pub path: String,
    /// What its headers and table say now.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub facts: Option<Facts>,
    /// Why they cannot be read.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub refused: Option<Unchanged>,
}
