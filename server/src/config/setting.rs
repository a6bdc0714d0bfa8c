//! One description of each setting, from which flags, variables, files, help and documents are made.

/// A set of settings that can be given by flags, by variables and in a file.
pub trait Configuration: Sized + 'static {
    /// Prefix of the names of variables.
    const VARIABLES: &'static str;
    /// Everything that can be set, in the order in which people should read it. Settings of a table come
    /// after those of none.
    const SETTINGS: &'static [Setting<Self>];

    /// The setting that [`Setting::path`] names.
    fn setting(path: &str) -> Option<&'static Setting<Self>> {
        Self::SETTINGS.iter().find(|setting| setting.path() == path)
    }
}

/// Something that can be set about a `C`.
#[derive(Clone, Copy, Debug)]
pub struct Setting<C> {
    /// Heading in help and documents.
    pub heading: &'static str,
    /// The table in which the file has it.
    pub table: Option<&'static str>,
    /// Name in the file.
    pub name: &'static str,
    /// Placeholder for the value.
    pub value_name: &'static str,
    /// Form of the value.
    pub form: Form,
    /// Description of the default, where a value does not say it.
    pub default_in_words: Option<&'static str>,
    /// A value as the file has it, where the form does not tell.
    pub example: Option<&'static str>,
    /// Whether its value must not be shown.
    pub is_secret: bool,
    /// Whether most users need it, so that the short help shows it.
    pub is_common: bool,
    pub(super) flag: Option<&'static str>,
    pub(super) variable: Option<&'static str>,
    pub(super) doc: &'static str,
    pub(super) set: fn(&mut C, &str) -> Result<(), String>,
    pub(super) get: fn(&C) -> Option<String>,
}

/// Form of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// In quotes, in the file.
    Text,
    /// Without.
    Number,
    /// `true` or `false`; as a flag, its name is enough.
    Switch,
    /// Several, by a flag each, or separated by commas; tables in the file.
    List,
    /// Several tables, in the file only.
    Tables,
}

impl<C: Configuration> Setting<C> {
    /// Defaults of an entry.
    pub(super) const PLAIN: Self = Self {
        heading: "",
        table: None,
        name: "",
        value_name: "",
        form: Form::Text,
        default_in_words: None,
        example: None,
        is_secret: false,
        is_common: false,
        flag: None,
        variable: None,
        doc: "",
        set: |_, _| Ok(()),
        get: |_| None,
    };

    /// What is written of the keys of tenants, wherever they are set.
    pub(super) const API_KEYS: Self = Self {
        flag: Some("api-key"),
        variable: Some("TERRACE_API_KEYS"),
        example: Some(r#"[{ name = "NAME", key = "KEY" }]"#),
        is_secret: true,
        ..Self::PLAIN
    };

    /// Returns its name in the file: `name`, or `table.name`.
    #[must_use]
    pub fn path(&self) -> String {
        match self.table {
            Some(table) => format!("{table}.{}", self.name),
            None => self.name.to_owned(),
        }
    }

    /// Returns its flag, without the leading hyphens.
    #[must_use]
    pub fn flag(&self) -> String {
        self.flag.map_or_else(|| self.name.replace('_', "-"), str::to_owned)
    }

    /// Returns its environment variable.
    #[must_use]
    pub fn variable(&self) -> String {
        let usual = || format!("{}{}", C::VARIABLES, self.name.to_uppercase());
        self.variable.map_or_else(usual, str::to_owned)
    }

    /// Returns its description in one paragraph.
    #[must_use]
    pub fn description(&self) -> String {
        let words: Vec<_> = self.doc.split_whitespace().collect();
        words.join(" ")
    }

    /// Returns the first sentence of the description.
    #[must_use]
    pub fn summary(&self) -> String {
        let description = self.description();
        let end = description.find(". ").map_or(description.len(), |end| end + 1);
        description[..end].to_owned()
    }

    /// Returns its default for display.
    #[must_use]
    pub fn default(&self) -> Option<String>
    where
        C: Default,
    {
        let value = || self.get(&C::default()).filter(|value| !value.is_empty());
        self.default_in_words.map(str::to_owned).or_else(value)
    }

    /// Sets it, as a flag or a variable would.
    ///
    /// # Errors
    /// How to write it.
    pub fn set(&self, config: &mut C, text: &str) -> Result<(), String> {
        (self.set)(config, text)
    }

    /// Its value as [`set`](Self::set) takes it, if it has any. Of a secret it tells only that there is one.
    #[must_use]
    pub fn get(&self, config: &C) -> Option<String> {
        (self.get)(config)
    }
}

/// Makes a configuration, its defaults, its files and its [`Setting`]s of one list. An entry has
///
/// - a comment, which is the setting's description wherever it is described,
/// - the name in the file, from which flag and variable follow,
/// - type and default,
/// - what stands for its value,
/// - in braces, any other field of [`Setting`] that is not as usual, or after `as` the constant of [`Setting`] that
///   it is like.
macro_rules! settings {
    (@like) => { Setting::PLAIN };
    (@like $like:ident) => { Setting::$like };
    (
        $(#[$config_meta:meta])*
        $config:ident, $prefix:literal {
            $($heading:literal {
                $(
                    $(#[doc = $doc:literal])+
                    $field:ident: $type:ty = $default:expr, $value_name:literal
                    $({ $($option:ident: $choice:expr),+ })? $(as $like:ident)?;
                )*
            })*
        }
        $(
            #[doc = $table_meta:literal]
            $table:ident: $table_type:ident, $table_heading:literal {
                $(
                    $(#[doc = $table_doc:literal])+
                    $table_field:ident: $table_field_type:ty = $table_default:expr,
                    $table_value_name:literal
                    $({ $($table_option:ident: $table_choice:expr),+ })?;
                )*
            }
        )?
    ) => {
        $(#[$config_meta])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $config {
            $($(
                $(#[doc = $doc])+
                #[serde(with = "crate::config::value")]
                pub $field: $type,
            )*)*
            $(
                #[doc = $table_meta]
                pub $table: $table_type,
            )?
        }

        $(
            #[doc = $table_meta]
            #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
            #[serde(default, deny_unknown_fields)]
            pub struct $table_type {
                $(
                    $(#[doc = $table_doc])+
                    #[serde(with = "crate::config::value")]
                    pub $table_field: $table_field_type,
                )*
            }

            impl Default for $table_type {
                fn default() -> Self {
                    Self { $($table_field: $table_default,)* }
                }
            }
        )?

        impl Default for $config {
            fn default() -> Self {
                Self { $($($field: $default,)*)* $($table: $table_type::default())? }
            }
        }

        impl Configuration for $config {
            const VARIABLES: &'static str = $prefix;
            const SETTINGS: &'static [Setting<Self>] = &[
                $($(Setting {
                    heading: $heading,
                    name: stringify!($field),
                    value_name: $value_name,
                    form: <$type as Value>::FORM,
                    doc: concat!($($doc, "\n"),+),
                    set: |config, text| Value::read(text).map(|value| config.$field = value),
                    get: |config| Value::written(&config.$field),
                    $($($option: $choice,)+)?
                    ..settings!(@like $($like)?)
                },)*)*
                $($(Setting {
                    heading: $table_heading,
                    table: Some(stringify!($table)),
                    name: stringify!($table_field),
                    value_name: $table_value_name,
                    form: <$table_field_type as Value>::FORM,
                    doc: concat!($($table_doc, "\n"),+),
                    set: |config, text| {
                        Value::read(text).map(|value| config.$table.$table_field = value)
                    },
                    get: |config| Value::written(&config.$table.$table_field),
                    $($($table_option: $table_choice,)+)?
                    ..Setting::PLAIN
                },)*)?
            ];
        }
    };
}

pub(super) use settings;
