//! The table of built-in models: the sizes of each, their defaults and bounds, and the function
//! that builds it.

use std::fmt;

use super::{
    Bert, Diffusion, Gpt, Learner, LstmModel, MobileNetV2, Ode, OptimizerKind, ResNet, UNet, Vae,
    Vgg, Vit, cnn, mlp,
};
use slabwise::error::{Error, Result};
use slabwise::nn::Module;
use slabwise::params::Scope;

/// Most sizes of one model.
const KEYS_MAX: usize = 8;

/// Most steps of an unrolled model, and most places of a transformer in all its layers: a program
/// of so many is compiled in seconds.
const UNROLLED_MAX: usize = 10_000;
const PLACES_MAX: usize = 1 << 18;

/// The flag of a model of which the last layer alone learns, and the prefix of that layer's
/// weights.
const FROZEN: &str = "frozen";
const HEAD: &str = "fc.";

type Values = [usize; KEYS_MAX];

/// One size of a model.
struct Key {
    name: &'static str,
    usual: usize,
    /// The bounds keep products of sizes from overflowing, and the number of layers small enough to
    /// compile.
    least: usize,
    most: usize,
    /// `true` or `false` instead of a number.
    flag: bool,
}

const fn key(name: &'static str, usual: usize, most: usize) -> Key {
    Key {
        name,
        usual,
        least: 1,
        most,
        flag: false,
    }
}

const fn flag(name: &'static str, usual: bool) -> Key {
    Key {
        name,
        usual: usual as usize,
        least: 0,
        most: 1,
        flag: true,
    }
}

/// The part of an example that has a label.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Labelled {
    Example,
    Pixel,
    /// Each token of the example, which consists of tokens.
    Token,
}

/// A built-in model.
pub(super) struct Row {
    pub name: &'static str,
    keys: &'static [Key],
    pub labelled: Labelled,
    /// The optimizer it is measured with by default.
    pub optimizer: OptimizerKind,
    example: fn(&Values) -> Vec<usize>,
    classes: fn(&Values) -> usize,
    layers: fn(&Values, &Scope) -> Box<dyn Module>,
    /// The layers of a model with a loss of its own.
    own: Option<fn(&Values, &Scope) -> Box<dyn Learner>>,
    /// The mistake in sizes that are each within their bounds.
    fault: fn(&Values) -> Option<String>,
}

/// The layers of a built-in model.
pub(super) enum Layers {
    /// With logits for the labels.
    Labelled(Box<dyn Module>),
    Own(Box<dyn Learner>),
}

/// Sizes of a built-in model, as [`Model::parse`](super::Model::parse) reads them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    row: usize,
    values: Values,
}

const CLASSES_MAX: usize = 1_000_000;
const WIDTH_MAX: usize = 1 << 16;
const CHANNELS_MAX: usize = 1 << 12;
const PIXELS_MAX: usize = 1 << 12;
const BLOCKS_MAX: usize = 1 << 8;

const fn gpt_keys(g: &Gpt) -> [Key; 6] {
    [
        key("layers", g.layers, 1000),
        key("width", g.width, WIDTH_MAX),
        key("heads", g.heads, WIDTH_MAX),
        key("length", g.length, PLACES_MAX / 4),
        key("vocabulary", g.vocabulary, CLASSES_MAX),
        flag("tied", g.tied),
    ]
}

/// The transformer of these sizes.
pub(super) fn gpt(&[layers, width, heads, length, vocabulary, tied, ..]: &Values) -> Gpt {
    Gpt {
        layers,
        width,
        heads,
        length,
        vocabulary,
        tied: tied == 1,
    }
}

fn lstm(&[vocabulary, width, hidden, length, layers, ..]: &Values) -> LstmModel {
    LstmModel {
        vocabulary,
        width,
        hidden,
        length,
        layers,
    }
}

fn unet(&[inputs, width, levels, classes, ..]: &Values) -> UNet {
    UNet {
        inputs,
        width,
        levels,
        classes,
    }
}

fn ode(&[width, hidden, steps, classes, ..]: &Values) -> Ode {
    Ode {
        width,
        hidden,
        steps,
        classes,
    }
}

const fn bert_keys(b: &Bert) -> [Key; 6] {
    [
        key("layers", b.layers, 1000),
        key("width", b.width, WIDTH_MAX),
        key("heads", b.heads, WIDTH_MAX),
        key("inner", b.inner, WIDTH_MAX),
        key("length", b.length, PLACES_MAX / 4),
        key("vocabulary", b.vocabulary, CLASSES_MAX),
    ]
}

fn bert(&[layers, width, heads, inner, length, vocabulary, ..]: &Values) -> Bert {
    Bert {
        layers,
        width,
        heads,
        inner,
        length,
        vocabulary,
        positions: length.max(Bert::BASE.positions),
        ..Bert::BASE
    }
}

fn vit(&[size, patch, layers, width, heads, inner, classes, ..]: &Values) -> Vit {
    Vit {
        size,
        patch,
        layers,
        width,
        heads,
        inner,
        classes,
        ..Vit::BASE
    }
}

/// The most groups, up to 32, that divide a number of channels.
fn groups(channels: usize) -> usize {
    1 << channels.trailing_zeros().min(5)
}

fn diffusion(
    &[
        size,
        inputs,
        width,
        levels,
        blocks,
        attention,
        heads,
        classes,
    ]: &Values,
) -> Diffusion {
    Diffusion {
        size,
        inputs,
        width,
        levels,
        blocks,
        attention,
        heads,
        classes,
        groups: groups(width),
        ..Diffusion::CIFAR
    }
}

fn vae(&[size, inputs, width, levels, blocks, latent, ..]: &Values) -> Vae {
    Vae {
        size,
        inputs,
        width,
        levels,
        blocks,
        latent,
        groups: groups(width),
    }
}

/// The mistake in a width that heads divide.
fn undivided(width: usize, heads: usize) -> Option<String> {
    (!width.is_multiple_of(heads))
        .then(|| format!("a width of {width} does not divide into {heads} heads"))
}

fn unhalved(size: usize, levels: usize) -> Option<String> {
    (!size.is_multiple_of(1 << (levels - 1)))
        .then(|| format!("a size of {size} is not halved {} times", levels - 1))
}

fn crowded(layers: usize, length: usize) -> Option<String> {
    (layers * length > PLACES_MAX).then(|| {
        format!("{layers} layers over a length of {length} are more than {PLACES_MAX} places")
    })
}

const BERT: Row = Row {
    name: "bert",
    keys: &bert_keys(&Bert::BASE),
    labelled: Labelled::Token,
    optimizer: OptimizerKind::AdamW,
    example: |v| vec![bert(v).length],
    classes: |v| bert(v).vocabulary,
    layers: |v, at| Box::new(bert(v).layers(at)),
    own: None,
    fault: |v| {
        let b = bert(v);
        undivided(b.width, b.heads).or_else(|| crowded(b.layers, b.length))
    },
};

fn none(_: &Values) -> Option<String> {
    None
}

fn unrolled(what: &str, steps: usize) -> Option<String> {
    (steps > UNROLLED_MAX).then(|| format!("{what} make {steps} steps, more than {UNROLLED_MAX}"))
}

const GPT: Row = Row {
    name: "gpt",
    keys: &gpt_keys(&Gpt::SMALL),
    labelled: Labelled::Token,
    optimizer: OptimizerKind::AdamW,
    example: |v| vec![gpt(v).length],
    classes: |v| gpt(v).vocabulary,
    layers: |v, at| Box::new(gpt(v).layers(at)),
    own: None,
    fault: |v| {
        let Gpt {
            width,
            heads,
            layers,
            length,
            ..
        } = gpt(v);
        undivided(width, heads).or_else(|| crowded(layers, length))
    },
};

/// A residual network of these stages.
const fn resnet(
    name: &'static str,
    keys: &'static [Key],
    layers: fn(&Values, &Scope) -> Box<dyn Module>,
) -> Row {
    Row {
        name,
        keys,
        labelled: Labelled::Example,
        optimizer: OptimizerKind::Sgd,
        example: |&[size, ..]| vec![3, size, size],
        classes: |v| v[1],
        layers,
        own: None,
        fault: none,
    }
}

const TABLE: &[Row] = &[
    Row {
        name: "mlp",
        keys: &[
            key("inputs", 784, CLASSES_MAX),
            key("hidden1", 512, WIDTH_MAX),
            key("hidden2", 256, WIDTH_MAX),
            key("classes", 10, WIDTH_MAX),
        ],
        labelled: Labelled::Example,
        optimizer: OptimizerKind::Sgd,
        example: |v| vec![v[0]],
        classes: |v| v[3],
        layers: |&[inputs, hidden1, hidden2, classes, ..], at| {
            Box::new(mlp(at, [inputs, hidden1, hidden2, classes]))
        },
        own: None,
        fault: none,
    },
    Row {
        name: "cnn",
        keys: &[
            key("size", 28, 1 << 10),
            key("width", 32, CHANNELS_MAX),
            key("hidden", 512, WIDTH_MAX),
            key("classes", 10, WIDTH_MAX),
        ],
        labelled: Labelled::Example,
        optimizer: OptimizerKind::Adam,
        example: |&[size, ..]| vec![1, size, size],
        classes: |v| v[3],
        layers: |&[size, width, hidden, classes, ..], at| {
            Box::new(cnn(at, [size, width, hidden, classes]))
        },
        own: None,
        fault: |&[size, ..]| {
            (!size.is_multiple_of(4)).then(|| format!("a size of {size} is not halved twice"))
        },
    },
    resnet(
        "resnet20",
        &[
            key("size", 32, PIXELS_MAX),
            key("classes", 10, CLASSES_MAX),
            key("width", 16, CHANNELS_MAX),
            key("blocks1", 3, BLOCKS_MAX),
            key("blocks2", 3, BLOCKS_MAX),
            key("blocks3", 3, BLOCKS_MAX),
        ],
        |&[_, classes, width, a, b, c, ..], at| {
            Box::new(
                ResNet {
                    classes,
                    width,
                    depths: vec![a, b, c],
                    ..ResNet::resnet20()
                }
                .layers(at),
            )
        },
    ),
    resnet(
        "resnet18",
        &[
            key("size", 64, PIXELS_MAX),
            key("classes", 200, CLASSES_MAX),
            key("width", 64, CHANNELS_MAX),
            key("blocks1", 2, BLOCKS_MAX),
            key("blocks2", 2, BLOCKS_MAX),
            key("blocks3", 2, BLOCKS_MAX),
            key("blocks4", 2, BLOCKS_MAX),
        ],
        |&[_, classes, width, a, b, c, d, _], at| {
            Box::new(
                ResNet {
                    classes,
                    width,
                    depths: vec![a, b, c, d],
                    ..ResNet::resnet18()
                }
                .layers(at),
            )
        },
    ),
    resnet(
        "resnet50",
        &[
            key("size", 224, PIXELS_MAX),
            key("classes", 1000, CLASSES_MAX),
            key("width", 64, CHANNELS_MAX),
            key("blocks1", 3, BLOCKS_MAX),
            key("blocks2", 4, BLOCKS_MAX),
            key("blocks3", 6, BLOCKS_MAX),
            key("blocks4", 3, BLOCKS_MAX),
        ],
        |&[_, classes, width, a, b, c, d, _], at| {
            Box::new(
                ResNet {
                    classes,
                    width,
                    depths: vec![a, b, c, d],
                    ..ResNet::resnet50()
                }
                .layers(at),
            )
        },
    ),
    Row {
        name: "mobilenetv2",
        keys: &[
            key("size", 224, PIXELS_MAX),
            key("classes", 1000, CLASSES_MAX),
            key("stem", 32, CHANNELS_MAX),
            key("last", 1280, WIDTH_MAX),
        ],
        labelled: Labelled::Example,
        optimizer: OptimizerKind::Sgd,
        example: |&[size, ..]| vec![3, size, size],
        classes: |v| v[1],
        layers: |&[_, classes, stem, last, ..], at| {
            Box::new(
                MobileNetV2 {
                    classes,
                    stem,
                    last,
                    ..MobileNetV2::standard()
                }
                .layers(at),
            )
        },
        own: None,
        fault: none,
    },
    Row {
        name: "unet",
        keys: &[
            key("inputs", 3, CHANNELS_MAX),
            key("width", 64, CHANNELS_MAX),
            key("levels", 4, 8),
            key("classes", 2, WIDTH_MAX),
            key("size", 128, PIXELS_MAX),
        ],
        labelled: Labelled::Pixel,
        optimizer: OptimizerKind::Adam,
        example: |&[inputs, _, _, _, size, ..]| vec![inputs, size, size],
        classes: |v| unet(v).classes,
        layers: |v, at| Box::new(unet(v).layers(at)),
        own: None,
        fault: |&[_, _, levels, _, size, ..]| {
            (!size.is_multiple_of(1 << levels))
                .then(|| format!("a size of {size} is not halved {levels} times"))
        },
    },
    Row {
        name: "vgg16",
        keys: &[
            key("size", 224, PIXELS_MAX),
            key("classes", 1000, CLASSES_MAX),
            key("width", 64, CHANNELS_MAX),
            key("places", 7, 1 << 6),
            key("hidden", 4096, WIDTH_MAX),
        ],
        labelled: Labelled::Example,
        optimizer: OptimizerKind::Sgd,
        example: |&[size, ..]| vec![3, size, size],
        classes: |v| v[1],
        layers: |&[_, classes, width, places, hidden, ..], at| {
            let vgg = Vgg::vgg16();
            // The stage widths in the usual multiples of the first.
            let stages = vgg
                .stages
                .iter()
                .map(|&[to, convolutions]| [to / 64 * width, convolutions])
                .collect();
            Box::new(
                Vgg {
                    stages,
                    classes,
                    places,
                    hidden,
                    ..vgg
                }
                .layers(at),
            )
        },
        own: None,
        fault: |&[size, ..]| {
            (size < 32).then(|| format!("a size of {size} is not halved five times"))
        },
    },
    GPT,
    Row {
        name: "gpt2",
        keys: &gpt_keys(&Gpt::GPT2),
        ..GPT
    },
    Row {
        name: "lstm",
        keys: &[
            key("vocabulary", LstmModel::SMALL.vocabulary, CLASSES_MAX),
            key("width", LstmModel::SMALL.width, WIDTH_MAX),
            key("hidden", LstmModel::SMALL.hidden, WIDTH_MAX),
            key("length", LstmModel::SMALL.length, UNROLLED_MAX),
            key("layers", LstmModel::SMALL.layers, UNROLLED_MAX),
            flag(FROZEN, false),
        ],
        labelled: Labelled::Token,
        optimizer: OptimizerKind::Adam,
        example: |v| vec![lstm(v).length],
        classes: |v| lstm(v).vocabulary,
        layers: |v, at| Box::new(lstm(v).layers(at)),
        own: None,
        fault: |v| {
            let LstmModel { length, layers, .. } = lstm(v);
            unrolled(
                &format!("a length of {length} and {layers} layers"),
                length * layers,
            )
        },
    },
    Row {
        name: "ode",
        keys: &[
            key("width", 16, WIDTH_MAX),
            key("hidden", 64, WIDTH_MAX),
            key("steps", 20, UNROLLED_MAX / 4),
            key("classes", 10, WIDTH_MAX),
        ],
        labelled: Labelled::Example,
        optimizer: OptimizerKind::Adam,
        example: |&[width, ..]| vec![width],
        classes: |v| ode(v).classes,
        layers: |v, at| Box::new(ode(v).layers(at)),
        own: None,
        fault: none,
    },
    BERT,
    Row {
        name: "minilm",
        keys: &bert_keys(&Bert::MINI_LM),
        ..BERT
    },
    Row {
        name: "vit",
        keys: &[
            key("size", Vit::BASE.size, PIXELS_MAX),
            key("patch", Vit::BASE.patch, 1 << 8),
            key("layers", Vit::BASE.layers, 1000),
            key("width", Vit::BASE.width, WIDTH_MAX),
            key("heads", Vit::BASE.heads, WIDTH_MAX),
            key("inner", Vit::BASE.inner, WIDTH_MAX),
            key("classes", Vit::BASE.classes, CLASSES_MAX),
        ],
        labelled: Labelled::Example,
        optimizer: OptimizerKind::AdamW,
        example: |v| vec![vit(v).inputs, vit(v).size, vit(v).size],
        classes: |v| vit(v).classes,
        layers: |v, at| Box::new(vit(v).layers(at)),
        own: None,
        fault: |v| {
            let v = vit(v);
            if !v.size.is_multiple_of(v.patch) {
                return Some(format!(
                    "a size of {} does not divide into patches of {}",
                    v.size, v.patch
                ));
            }
            let places = (v.size / v.patch).pow(2) + 1;
            undivided(v.width, v.heads).or_else(|| crowded(v.layers, places))
        },
    },
    Row {
        name: "diffusion",
        keys: &[
            key("size", Diffusion::CIFAR.size, PIXELS_MAX),
            key("inputs", Diffusion::CIFAR.inputs, CHANNELS_MAX),
            key("width", Diffusion::CIFAR.width, CHANNELS_MAX),
            key("levels", Diffusion::CIFAR.levels, 8),
            key("blocks", Diffusion::CIFAR.blocks, 1 << 5),
            key("attention", Diffusion::CIFAR.attention, 8),
            key("heads", Diffusion::CIFAR.heads, CHANNELS_MAX),
            key("classes", Diffusion::CIFAR.classes, CLASSES_MAX),
        ],
        labelled: Labelled::Example,
        optimizer: OptimizerKind::AdamW,
        example: |v| vec![diffusion(v).inputs, diffusion(v).size, diffusion(v).size],
        classes: |v| diffusion(v).classes,
        layers: |v, at| Box::new(diffusion(v).layers(at)),
        own: Some(|v, at| Box::new(diffusion(v).layers(at))),
        fault: |v| {
            let d = diffusion(v);
            // Heads that divide the narrowest level with attention divide those below it.
            let first = d.levels - d.attention.min(d.levels);
            if d.width % 2 == 1 {
                return Some(format!("a width of {} has no half for the time", d.width));
            }
            undivided(d.width << first, d.heads).or_else(|| unhalved(d.size, d.levels))
        },
    },
    Row {
        name: "vae",
        keys: &[
            key("size", Vae::SMALL.size, PIXELS_MAX),
            key("inputs", Vae::SMALL.inputs, CHANNELS_MAX),
            key("width", Vae::SMALL.width, CHANNELS_MAX),
            key("levels", Vae::SMALL.levels, 8),
            key("blocks", Vae::SMALL.blocks, 1 << 5),
            key("latent", Vae::SMALL.latent, CHANNELS_MAX),
        ],
        labelled: Labelled::Example,
        optimizer: OptimizerKind::AdamW,
        example: |v| vec![vae(v).inputs, vae(v).size, vae(v).size],
        classes: |_| 1,
        layers: |v, at| Box::new(vae(v).layers(at)),
        own: Some(|v, at| Box::new(vae(v).layers(at))),
        fault: |v| unhalved(vae(v).size, vae(v).levels),
    },
];

/// The names of the models that have sizes.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|row| row.name)
}

impl Sizes {
    /// The default sizes of the model of this name.
    pub(super) fn usual(name: &str) -> Option<Sizes> {
        let row = TABLE.iter().position(|row| row.name == name)?;
        let mut values = [0; KEYS_MAX];
        values
            .iter_mut()
            .zip(TABLE[row].keys)
            .for_each(|(value, key)| *value = key.usual);
        Some(Sizes { row, values })
    }

    /// The sizes of a transformer under a name.
    pub(super) fn of_gpt(name: &str, g: &Gpt) -> Option<Sizes> {
        let values = [
            g.layers,
            g.width,
            g.heads,
            g.length,
            g.vocabulary,
            usize::from(g.tied),
            0,
            0,
        ];
        Some(Sizes {
            values,
            ..Sizes::usual(name)?
        })
    }

    /// These, changed by `text`, as in `length=320,layers=2`.
    pub(super) fn set(mut self, text: &str) -> Result<Sizes> {
        let (name, keys) = (self.row().name, self.row().keys);
        let refuse = |why: String| Err(Error::Value(format!("{name}{why}")));
        let known = || {
            keys.iter()
                .map(|key| key.name)
                .collect::<Vec<_>>()
                .join(", ")
        };
        let mut given = [false; KEYS_MAX];
        for setting in text.split(',').map(str::trim) {
            if setting.is_empty() {
                return refuse(format!(
                    ":{text}: a size is missing; there are {}, as in {name}:{}={}",
                    known(),
                    keys[0].name,
                    keys[0].usual
                ));
            }
            let (key, value) = setting
                .split_once('=')
                .map_or((setting, ""), |(key, value)| (key.trim(), value.trim()));
            let Some(at) = keys.iter().position(|known| known.name == key) else {
                return refuse(format!(" has no size \"{key}\"; there are {}", known()));
            };
            if std::mem::replace(&mut given[at], true) {
                return refuse(format!(": {key} is given twice"));
            }
            let Key {
                least, most, flag, ..
            } = keys[at];
            let (read, wanted) = match flag {
                true => (
                    value.parse::<bool>().ok().map(usize::from),
                    "true or false".to_string(),
                ),
                false => (
                    value.parse().ok().filter(|n| (least..=most).contains(n)),
                    format!("a number from {least} to {most}"),
                ),
            };
            match read {
                Some(read) => self.values[at] = read,
                None => return refuse(format!(": {key} is \"{value}\", not {wanted}")),
            }
        }
        match (self.row().fault)(&self.values) {
            Some(fault) => refuse(format!(": {fault}")),
            None => Ok(self),
        }
    }

    pub(super) fn row(&self) -> &'static Row {
        &TABLE[self.row]
    }

    pub(super) fn values(&self) -> &Values {
        &self.values
    }

    pub(super) fn example(&self) -> Vec<usize> {
        (self.row().example)(&self.values)
    }

    pub(super) fn classes(&self) -> usize {
        (self.row().classes)(&self.values)
    }

    /// The prefix of the names of the weights that learn, if not all do.
    pub(super) fn head(&self) -> Option<&'static str> {
        let mut flags = self.row().keys.iter().zip(&self.values);
        flags
            .any(|(key, &value)| key.name == FROZEN && value == 1)
            .then_some(HEAD)
    }

    pub(super) fn layers(&self, at: &Scope) -> Layers {
        match self.row().own {
            Some(own) => Layers::Own(own(&self.values, at)),
            None => Layers::Labelled((self.row().layers)(&self.values, at)),
        }
    }
}

/// The model's name and the sizes that differ from the defaults, as they are parsed.
impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().name)?;
        let mut mark = ':';
        for (key, &value) in self
            .row()
            .keys
            .iter()
            .zip(&self.values)
            .filter(|(key, value)| key.usual != **value)
        {
            write!(f, "{mark}{}=", key.name)?;
            if key.flag {
                write!(f, "{}", value == 1)?
            } else {
                write!(f, "{value}")?
            }
            mark = ',';
        }
        Ok(())
    }
}

impl fmt::Debug for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The sizes of each model that can be set, for the help of commands: one line for each, with the
/// defaults.
pub(super) fn help() -> String {
    let line = |row: &Row| {
        let set = |key: &Key| {
            if key.flag {
                format!("{}={}", key.name, key.usual == 1)
            } else {
                format!("{}={}", key.name, key.usual)
            }
        };
        format!(
            "  {}:{}",
            row.name,
            row.keys.iter().map(set).collect::<Vec<_>>().join(",")
        )
    };
    TABLE.iter().map(line).collect::<Vec<_>>().join("\n")
}
