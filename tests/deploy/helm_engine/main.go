// Renders a chart as Helm's engine does: text/template, sprig, and the functions that Helm adds.
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v3"
)

type files struct{ root string }

func (f files) Get(name string) string {
	text, _ := os.ReadFile(filepath.Join(f.root, name))
	return string(text)
}

func main() {
	chart := os.Args[1]
	var dot map[string]interface{}
	if err := yaml.NewDecoder(os.Stdin).Decode(&dot); err != nil {
		panic(err)
	}
	dot["Files"] = files{chart}
	all := template.New("chart").Option("missingkey=error").Funcs(sprig.TxtFuncMap())
	all.Funcs(template.FuncMap{
		"include": func(name string, data interface{}) (string, error) {
			var out bytes.Buffer
			err := all.ExecuteTemplate(&out, name, data)
			return out.String(), err
		},
		"toYaml": func(value interface{}) string {
			var out bytes.Buffer
			encoder := yaml.NewEncoder(&out)
			encoder.SetIndent(2)
			encoder.Encode(value)
			return strings.TrimSuffix(out.String(), "\n")
		},
		"fail": func(message string) (string, error) { return "", errors.New(message) },
	})
	paths, _ := filepath.Glob(filepath.Join(chart, "templates", "*"))
	for _, path := range paths {
		text, _ := os.ReadFile(path)
		template.Must(all.New(filepath.Base(path)).Parse(string(text)))
	}
	rendered := map[string]string{}
	for _, path := range paths {
		if strings.HasSuffix(path, ".yaml") {
			var out bytes.Buffer
			if err := all.ExecuteTemplate(&out, filepath.Base(path), dot); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			rendered[filepath.Base(path)] = out.String()
		}
	}
	yaml.NewEncoder(os.Stdout).Encode(rendered)
}
