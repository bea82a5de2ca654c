//! Models in several files, as `llama-gguf-split` writes them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::weights::WeightsError;

/// The metadata key of the number of files.
const COUNT: &str = "split.count";

/// The other files of a model that was split, by one of them and its metadata.
///
/// # Errors
/// If the name of the file does not say which of them it is.
pub(in crate::weights) fn splits(
    path: &Path,
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<PathBuf>, WeightsError> {
    let count = metadata.get(COUNT).and_then(|count| count.parse().ok());
    let count: u16 = count.unwrap_or(1);
    if count <= 1 {
        return Ok(Vec::new());
    }
    let end = format!("-of-{count:05}.gguf");
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let own = name.strip_suffix(&*end).and_then(|start| {
        let (start, number) = start.rsplit_once('-')?;
        let number = number.parse::<u16>().ok().filter(|_| number.len() == 5)?;
        Some((start, number))
    });
    let Some((start, own)) = own.filter(|&(_, own)| (1..=count).contains(&own)) else {
        let detail = format!(
            "it is one of {count} files ({COUNT}), whose names end in -00001{end} and so on: \
             give it its name back, or join them with llama-gguf-split --merge"
        );
        return Err(WeightsError::Unsupported {
            path: path.to_owned(),
            detail,
        });
    };
    let others = (1..=count).filter(|&number| number != own);
    let named = others.map(|number| path.with_file_name(format!("{start}-{number:05}{end}")));
    Ok(named.collect())
}
