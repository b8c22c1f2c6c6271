//! The methods about images that are in use: `image.change` and `image.query`.

use std::path::Path;

use ferrite_serve::blkif::lifecycle::ImageReply;

use super::protocol::{
    ChangeImageParams, ImageAnswer, ImageFacts, Images, QueryImagesParams, RpcError, Unchanged,
    code,
};
use crate::{Failure, Shared, asking};

/// Changes the headers of an image through the worker that writes to it.
pub(super) fn change(
    shared: &Shared,
    request: &ChangeImageParams,
) -> Result<ImageAnswer, RpcError> {
    let path = checked(&request.path)?;
    match asking::ask(shared, path, Some(&request.change)).map_err(failed)? {
        Some(reply) => Ok(answer(reply)),
        None => Ok(ImageAnswer::default()),
    }
}

/// Tells the facts of those of the images that a worker writes to.
pub(super) fn query(shared: &Shared, request: &QueryImagesParams) -> Result<Images, RpcError> {
    let mut images = Vec::new();
    for path in &request.paths {
        if let Some(reply) = asking::ask(shared, checked(path)?, None).map_err(failed)? {
            let ImageAnswer { facts, refused } = answer(reply);
            images.push(ImageFacts { path: path.clone(), facts, refused });
        }
    }
    Ok(Images { images })
}

fn checked(path: &str) -> Result<&Path, RpcError> {
    let path = Path::new(path);
    match path.is_absolute() {
        true => Ok(path),
        false => {
            let why = format!("the path {} is not absolute", path.display());
            Err(RpcError::new(code::INVALID_PARAMS, why, "name the image by its whole path"))
        }
    }
}

fn failed(Failure { why, help }: Failure) -> RpcError {
    RpcError::new(code::FAILED, why, &help)
}

fn answer(reply: ImageReply) -> ImageAnswer {
    match reply {
        ImageReply::Facts(facts) => ImageAnswer { facts: Some(facts), refused: None },
        ImageReply::Refused { errno, why } => {
            ImageAnswer { facts: None, refused: Some(Unchanged { errno, why }) }
        }
        ImageReply::NotMine => ImageAnswer::default(),
    }
}
