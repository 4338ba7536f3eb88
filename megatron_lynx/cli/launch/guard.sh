# shellcheck shell=bash
# Read by every bash of a captured script (BASH_ENV). Before each simple command: the stand-ins are first
# on PATH again, a launcher called by its path becomes its stand-in, and the names of unset variables are
# noted. In a restricted capture nothing is written, and what is missing on this machine is passed over.
set -o functrace
exec {BASH_XTRACEFD}>/dev/null

_lynx_note() { printf '%s\n' "$2" >>"$LYNX_CAPTURE/$1"; }

_lynx_unset() {
    local rest=$1 name
    while [[ $rest =~ \$\{?([A-Za-z_][A-Za-z0-9_]*|[1-9])([^A-Za-z0-9_].)? ]]; do
        name=${BASH_REMATCH[1]}
        rest=${rest#*"${BASH_REMATCH[0]}"}
        case ${BASH_REMATCH[2]-} in :-* | :=* | -* | =* | +* | :+* | '#'*) continue ;; esac
        if [[ $name == [1-9] ]]; then
            if ((name > $2)); then _lynx_note unset "$name"; fi
        elif [[ -z ${!name+x} ]] && ! declare -p "$name" >/dev/null 2>&1; then
            _lynx_note unset "$name"
        fi
    done
}

# Sets _lynx_do to what is to be run instead of the command, if anything is.
_lynx_guard() {
    local text=$1 before='' word rest base
    _lynx_do=''
    if [[ ${PATH-} != "$LYNX_PATH"* || $LYNX_RESTRICTED == 1 && ${PATH-} != "$LYNX_PATH" ]]; then
        if [[ $LYNX_RESTRICTED == 1 ]]; then PATH=$LYNX_PATH; else PATH=$LYNX_PATH:${PATH-}; fi
    fi
    if [[ $text == *'$'* ]]; then _lynx_unset "$text" "$2"; fi
    rest=$text
    while [[ $rest =~ ^[A-Za-z_][A-Za-z0-9_]*=(\"[^\"]*\"|\'[^\']*\'|[^[:space:]\"\'\$\`\(]*|\$[A-Za-z_][A-Za-z0-9_]*)[[:space:]]+ ]]; do
        before+=${BASH_REMATCH[0]}
        rest=${rest#"${BASH_REMATCH[0]}"}
    done
    if [[ $rest =~ ^(\"[^\"\`]*\"|\'[^\']*\'|[^[:space:]\"\'\;\|\&\<\>\(\)\`]+) ]]; then
        word=${BASH_REMATCH[1]}
        rest=${rest#"$word"}
        if [[ $word == *'$('* || $word == *=* ]]; then
            word=''
        elif [[ $word == *'$'* || $word == [\"\']* ]]; then
            eval "word=$word" 2>/dev/null || word=''
        fi
        if [[ $word == *[[:space:]]* && $word != *[\"\']* ]]; then
            rest=" ${word#*[[:space:]]}$rest"
            word=${word%%[[:space:]]*}
        fi
    else
        word=''
    fi
    base=${word##*/}
    if [[ $word == */* ]]; then
        case $base in python[0-9]*) base=python ;; esac
        if [[ -x $LYNX_CAPTURE/bin/$base ]]; then
            _lynx_do="$before\"\$LYNX_CAPTURE/bin/$base\"$rest"
        elif [[ $base == *.py ]]; then
            _lynx_do="$before\"\$LYNX_CAPTURE/bin/python\" \"$word\"$rest"
        elif [[ $LYNX_RESTRICTED == 1 && $base == bash ]]; then
            _lynx_do="${before}bash$rest"
        elif [[ $LYNX_RESTRICTED == 1 && -f $word ]] && _lynx_shell_script "$word"; then
            _lynx_do="${before}bash \"$word\"$rest"
        elif [[ $LYNX_RESTRICTED == 1 ]]; then
            _lynx_do="$before\"\$LYNX_CAPTURE/bin/.unknown\" \"$word\"$rest"
        fi
    fi
    if [[ $LYNX_RESTRICTED == 1 ]]; then _lynx_restricted "$word" "$rest" "$before" "$text"; fi
}

_lynx_shell_script() {
    local first=''
    IFS= read -r first <"$1" 2>/dev/null || true
    [[ $first == '#!'*sh* || $first != '#!'* && $1 == *.sh ]]
}

_lynx_restricted() {
    local word=$1 rest=$2 where
    case $word in
    cd | pushd | source | .)
        where=''
        eval "_lynx_words=($rest)" 2>/dev/null
        where=${_lynx_words[0]-}
        if [[ $word == cd || $word == pushd ]]; then
            if [[ -n $where && $where != -* && ! -d $where ]]; then
                _lynx_note missing "$word $where"
                _lynx_do=:
            fi
        elif [[ ! -f $where ]]; then
            _lynx_note missing "$word $where"
            _lynx_do=:
        else
            where=$(_lynx_filled "$where")
            if [[ $where == "$LYNX_CAPTURE"/* ]]; then _lynx_do="source \"$where\""; fi
        fi
        ;;
    kill | disown) _lynx_do=: ;;
    esac
    if [[ $4 == *'>'* ]]; then
        where=$("$LYNX_CAPTURE/bin/.plain" "${_lynx_do:-$4}")
        if [[ $where != "${_lynx_do:-$4}" ]]; then
            _lynx_note writes "${4//$'\n'/ }"
            _lynx_do=$where
        fi
    fi
}

# Placeholders of examples (NAME=<your name>) are no shell: a copy with a word for them, else the file itself.
_lynx_filled() {
    local pattern='^([[:space:]]*(export[[:space:]]+)?[A-Za-z_]+=)(<[^<>]*>)[[:space:]]*$' copy
    if grep -Eq "$pattern" "$1"; then
        copy=$LYNX_CAPTURE/${1##*/}.$RANDOM
        sed -E "s/$pattern/\\1placeholder/" "$1" >"$copy"
        _lynx_note missing "placeholders in ${1##*/}"
        printf '%s' "$copy"
    else
        printf '%s' "$1"
    fi
}

# extdebug makes bash skip a command before which this trap fails; bash wants it set after start-up.
trap 'shopt -s extdebug
case $- in *u*) set +u; _lynx_guard "$BASH_COMMAND" $#; set -u ;; *) _lynx_guard "$BASH_COMMAND" $# ;; esac
[[ -z $_lynx_do ]] || { eval "$_lynx_do"; ! :; }' DEBUG

command_not_found_handle() {
    if [[ $LYNX_RESTRICTED == 1 ]]; then "$LYNX_CAPTURE/bin/.unknown" "$@"; else
        printf '%s: command not found\n' "$1" >&2
        return 127
    fi
}
